"""A run gives the same weights however it is started, and wherever its teacher's losses are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World, assert_equal_weights, make_world

from vocagnolm import VocAgnoConfig, VocAgnoTrainer, __main__, prepare_dataset

Weights = dict[str, torch.Tensor]

SHORT: dict[str, Any] = {
    "max_length": 128,
    "global_batch_tokens": 512,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "selection": "accept",
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CORPORA = ("documents", "conversations")
# Where the teacher's losses come from.
TEACHERS = ("model", "store", "none")


class Runs:
    """A world with both kinds of corpora, and a function for each way to start a run there."""

    def __init__(self, world: World):
        self.world = world
        self.command = cache(self._command)

    def rows(self, corpus: str) -> list[dict[str, Any]]:
        """The documents, or conversations made of them."""
        rows = self.world.rows()
        if corpus == "documents":
            return rows
        return [{"prompt": row["text"][:20], "completion": row["text"][20:]} for row in rows]

    def file(self, corpus: str) -> Path:
        """The corpus as a file."""
        path = self.world.root / f"{corpus}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows(corpus)))
        return path

    def store(self, corpus: str) -> str:
        """The losses of the corpus."""
        return str(self.world.score(f"store_{corpus}", dataset=str(self.file(corpus))))

    def method(self, teacher: str) -> dict[str, Any]:
        """The settings of a run."""
        if teacher == "none":
            return {**SHORT, "selection": "top_k", "method": "cpt"}
        return SHORT

    def named_teacher(self, corpus: str, teacher: str) -> str | None:
        """The teacher as Python names it."""
        names = {"model": str(self.world.teacher), "none": None}
        return self.store(corpus) if teacher == "store" else names[teacher]

    def options(self, corpus: str, teacher: str) -> dict[str, Any]:
        """The options of the command line."""
        options = {name: str(value) for name, value in self.method(teacher).items()}
        options |= {"dataset": str(self.file(corpus)), "save_steps": "9"}
        name = "teacher_losses" if teacher == "store" else "teacher"
        return {**options, "eval_fraction": None, name: self.named_teacher(corpus, teacher)}

    def _command(self, corpus: str, teacher: str) -> Weights:
        """The weights of `vocagnolm train` with options, which the others are compared with."""
        return self.world.train(f"{corpus}_{teacher}", **self.options(corpus, teacher))

    def recipe(self, corpus: str, teacher: str) -> Weights:
        """Run the command with a recipe that has all the options."""
        recipe = self.world.root / "recipe.yaml"
        options = {"student": str(self.world.student), **self.options(corpus, teacher)}
        options = {name: value for name, value in options.items() if value is not None}
        recipe.write_text(yaml.safe_dump({**options, **self.method(teacher)}))
        out = self.world.root / f"recipe_{corpus}_{teacher}"
        argv = ["train", f"--config={recipe}", f"--output_dir={out}", "--use_cpu"]
        assert __main__.main(argv) == 0
        return AutoModelForCausalLM.from_pretrained(out).state_dict()

    def trained(self, kind: str, **arguments: Any) -> Weights:
        """Train in Python with a kind of teacher."""
        settings = {**self.method(kind), "use_cpu": True, "save_strategy": "no"}
        out = self.world.root / "python"
        args = VocAgnoConfig(str(out), report_to=["none"], disable_tqdm=True, **settings)
        trainer = VocAgnoTrainer(args=args, **arguments)
        trainer.train()
        return trainer.model.state_dict()

    def names(self, corpus: str, teacher: str) -> Weights:
        """Give names, and rows as dicts."""
        return self.trained(
            teacher,
            model=str(self.world.student),
            teacher=self.named_teacher(corpus, teacher),
            train_dataset=self.rows(corpus),
        )

    def loaded(self, corpus: str, teacher: str) -> Weights:
        """Give models without names, and a `datasets.Dataset`."""
        student = AutoModelForCausalLM.from_pretrained(self.world.student, dtype="float32")
        student.name_or_path = student.config.name_or_path = ""
        guide: Any = self.named_teacher(corpus, teacher)
        if teacher == "model":
            guide = AutoModelForCausalLM.from_pretrained(guide, dtype="float32")
        return self.trained(
            teacher,
            model=student,
            teacher=guide,
            train_dataset=datasets.Dataset.from_list(self.rows(corpus)),
            processing_class=AutoTokenizer.from_pretrained(self.world.student),
        )

    def packed(self, corpus: str, teacher: str) -> Weights:
        """Give names, and packed sequences."""
        places = [self.world.student, self.world.teacher][: 1 + (teacher == "model")]
        tokenizers = [AutoTokenizer.from_pretrained(place) for place in places]
        rows = datasets.Dataset.from_list(self.rows(corpus))
        return self.trained(
            teacher,
            model=str(self.world.student),
            teacher=self.named_teacher(corpus, teacher),
            train_dataset=prepare_dataset(rows, *tokenizers, max_length=128, teacher_context=128),
        )


@pytest.fixture(scope="module")
def runs(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """Runs on short texts, which both models read whole."""
    root = tmp_path_factory.mktemp("runs")
    texts = [text[:100] for text in training_texts[:40]]
    world = make_world(root, tiny_llama, tokenizer_dirs, texts, initializer_range=0.1)
    for place in (world.student, world.teacher):
        tokenizer: Any = AutoTokenizer.from_pretrained(place)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(place)
    return Runs(world)


# `prepare_dataset` reads no store, so no packed sequences meet one.
DOORS = list(product(["recipe", "names", "loaded", "packed"], TEACHERS))
DOORS.remove(("packed", "store"))


@pytest.mark.parametrize(("door", "teacher"), DOORS)
@pytest.mark.parametrize("corpus", CORPORA)
def test_every_door_gives_the_weights_of_the_command(
    corpus: str, teacher: str, door: str, runs: Runs
) -> None:
    found = getattr(runs, door)(corpus, teacher)
    expected = runs.command(corpus, teacher)
    assert_equal_weights({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("corpus", CORPORA)
def test_stored_losses_give_the_weights_of_the_teacher(corpus: str, runs: Runs) -> None:
    stored = runs.command(corpus, "store")
    online = runs.command(corpus, "model")
    if corpus == "documents":
        assert_equal_weights(stored, online)
    # Conversations are scored in other batches than they are trained on, which round differently.
    for name, weight in stored.items():
        assert torch.allclose(weight, online[name], rtol=0, atol=1e-6), name
    without = runs.command(corpus, "none")
    assert not any(torch.equal(stored[name], without[name]) for name in stored)


def test_adapters_of_a_config_are_those_of_the_options(runs: Runs) -> None:
    peft = pytest.importorskip("peft")
    lora = {"use_peft": "True", "lora_r": "4"}
    argv = runs.world.argv("lora", **runs.options("documents", "none"), **lora, use_cpu="True")
    assert __main__.main(["train", *argv]) == 0
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear")
    found = runs.trained(
        "none",
        model=str(runs.world.student),
        train_dataset=runs.rows("documents"),
        peft_config=config,
    )
    expected = peft.load_peft_weights(str(runs.world.root / "lora"), device="cpu")
    assert expected
    for name, weight in expected.items():
        adapter = name.replace(".weight", ".default.weight")
        assert torch.equal(found[adapter], weight), name
