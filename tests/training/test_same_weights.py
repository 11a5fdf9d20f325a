"""A run gives the same weights however it is started, and wherever its teacher's losses are."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import yaml
from fuzz import FUZZ_PIECES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from world import World, assert_equal_weights, make_world

from vocagnolm import VocAgnoConfig, VocAgnoTrainer, __main__, prepare_dataset
from vocagnolm.packing import Blocks
from vocagnolm.run.parser import parse
from vocagnolm.training.models import read_models
from vocagnolm.training.packed import pack_documents, read_corpora

Weights = dict[str, torch.Tensor]

SHORT: dict[str, Any] = {
    "max_length": 128,
    "global_batch_tokens": 512,
    "max_steps": 3,
    "learning_rate": 1e-2,
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
CORPORA = ("documents", "conversations")
# The same with weights of rows, and of messages.
WEIGHTED = ("weighted_documents", "weighted_conversations")
# Where the teacher's losses come from, and the method that uses them.
METHODS = {
    "model": {"selection": "accept"},
    "store": {"selection": "accept"},
    "none": {"method": "cpt"},
}


class Runs:
    """A world with both kinds of corpora, and a function for each way to start a run there."""

    def __init__(self, world: World):
        self.world = world
        self.command = cache(self._command)

    def rows(self, corpus: str) -> list[dict[str, Any]]:
        """The documents, or conversations made of them."""
        rows = self.world.rows()
        if corpus == "weighted_documents":
            return [row | {"weight": (-0.5, 0, 1, 3)[n % 4]} for n, row in enumerate(rows)]
        if corpus == "documents":
            return rows
        if corpus == "conversations":
            return [{"prompt": row["text"][:20], "completion": row["text"][20:]} for row in rows]
        talks = []
        for number, row in enumerate(rows):
            asked, said = {"role": "user", "content": row["text"][:20]}, row["text"][20:]
            answer = {"role": "assistant", "content": said, "weight": (0.5, -1, None)[number % 3]}
            talks.append({"messages": [asked, answer]})
        return talks

    def options(self, corpus: str, teacher: str) -> dict[str, Any]:
        """The options of the command line."""
        for name in (corpus.removeprefix("weighted_"), corpus):
            file = self.world.root / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in self.rows(name)))
        options = SHORT | {"dataset": str(file), "save_steps": 9, **METHODS[teacher]}
        if teacher == "model":
            options["teacher"] = str(self.world.teacher)
        if teacher == "store":
            # A store knows no weights, but finds the texts.
            scored = file.with_name(file.name.removeprefix("weighted_"))
            store = self.world.score(f"store_{scored.stem}", dataset=str(scored))
            options["teacher_losses"] = str(store)
        return options

    def _command(self, corpus: str, teacher: str) -> Weights:
        """The weights of `vocagnolm train` with options, which the others are compared with."""
        options = {name: str(value) for name, value in self.options(corpus, teacher).items()}
        given = {"teacher": None, "eval_fraction": None, **options}
        return self.world.train(f"{corpus}_{teacher}", **given)

    def recipe(self, corpus: str, teacher: str) -> Weights:
        """Run the command with a recipe that has all the options."""
        recipe = self.world.root / "recipe.yaml"
        options = {"student": str(self.world.student), **self.options(corpus, teacher)}
        recipe.write_text(yaml.safe_dump(options))
        out = self.world.root / f"recipe_{corpus}_{teacher}"
        argv = ["train", f"--config={recipe}", f"--output_dir={out}", "--use_cpu"]
        assert __main__.main(argv) == 0
        return AutoModelForCausalLM.from_pretrained(out).state_dict()

    def names(self, corpus: str, kind: str, /, **arguments: Any) -> Weights:
        """Train in Python, with names and with rows as dicts unless other arguments are given."""
        options = self.options(corpus, kind)
        del options["dataset"]
        guide = [options.pop(name) for name in ("teacher", "teacher_losses") if name in options]
        given = {"model": str(self.world.student), "train_dataset": self.rows(corpus)}
        given |= {"teacher": guide[0] if guide else None, **arguments}
        quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        args = VocAgnoConfig(str(self.world.root / "python"), **options | quiet)
        trainer = VocAgnoTrainer(args=args, **given)
        trainer.train()
        return trainer.model.state_dict()

    def loaded(self, corpus: str, teacher: str) -> Weights:
        """Give models without names, and a `datasets.Dataset`."""
        student, guide = (
            AutoModelForCausalLM.from_pretrained(place, dtype="float32")
            for place in (self.world.student, self.world.teacher)
        )
        student.name_or_path = student.config.name_or_path = ""
        arguments = {"model": student}
        if teacher == "model":
            arguments["teacher"] = guide
        tokenizer = AutoTokenizer.from_pretrained(self.world.student)
        rows = datasets.Dataset.from_list(self.rows(corpus))
        arguments |= {"train_dataset": rows, "processing_class": tokenizer}
        return self.names(corpus, teacher, **arguments)

    def packed(self, corpus: str, teacher: str) -> Weights:
        """Give names, and packed sequences."""
        places = [self.world.student, self.world.teacher][: 1 + (teacher == "model")]
        tokenizers = [AutoTokenizer.from_pretrained(place) for place in places]
        rows = datasets.Dataset.from_list(self.rows(corpus))
        blocks = prepare_dataset(rows, *tokenizers, max_length=128, teacher_context=128)
        return self.names(corpus, teacher, train_dataset=blocks)


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
DOORS = list(product(["recipe", "names", "loaded", "packed"], METHODS))
DOORS.remove(("packed", "store"))


DOORS_OF_CORPORA = list(product(CORPORA, DOORS))
DOORS_OF_CORPORA += [
    (corpus, (door, "model")) for corpus in WEIGHTED for door in ("names", "packed")
]


@pytest.mark.parametrize(("corpus", "door", "teacher"), [(c, *d) for c, d in DOORS_OF_CORPORA])
def test_every_door_gives_the_weights_of_the_command(
    corpus: str, teacher: str, door: str, runs: Runs
) -> None:
    found = getattr(runs, door)(corpus, teacher)
    expected = runs.command(corpus, teacher)
    assert_equal_weights({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("corpus", CORPORA + WEIGHTED)
def test_stored_losses_give_the_weights_of_the_teacher(corpus: str, runs: Runs) -> None:
    stored = runs.command(corpus, "store")
    online = runs.command(corpus, "model")
    if corpus.endswith("documents"):
        assert_equal_weights(stored, online)
    # Conversations are scored in other batches than they are trained on, which round differently.
    for name, weight in stored.items():
        assert torch.allclose(weight, online[name], rtol=0, atol=1e-6), name
    if corpus in WEIGHTED:
        other = runs.command(corpus.removeprefix("weighted_"), "model")
        assert not any(torch.equal(online[name], other[name]) for name in online)
    without = runs.command(corpus, "none")
    assert not any(torch.equal(stored[name], without[name]) for name in stored)


def test_adapters_of_a_config_are_those_of_the_options(runs: Runs) -> None:
    peft = pytest.importorskip("peft")
    options = {**runs.options("documents", "none"), "use_peft": True, "lora_r": 4, "use_cpu": True}
    strings = {name: str(value) for name, value in options.items()}
    argv = runs.world.argv("lora", **{"teacher": None, "eval_fraction": None, **strings})
    assert __main__.main(["train", *argv]) == 0
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, target_modules="all-linear")
    found = runs.names("documents", "none", peft_config=config)
    expected = peft.load_peft_weights(str(runs.world.root / "lora"), device="cpu")
    assert expected
    for name, weight in expected.items():
        adapter = name.replace(".weight", ".default.weight")
        assert torch.equal(found[adapter], weight), name


# -- Packed sequences ------------------------------------------------------------------------

LENGTH, CONTEXT = 32, 128
# Some documents have no text, or only white space; others do not fit and are cut.
TEXTS = st.one_of(
    st.none(),
    st.lists(st.sampled_from([*FUZZ_PIECES, " ", "\n\n"]), max_size=40).map("".join),
)


def of_prepare_dataset(world: World, texts: list[str | None]) -> Any:
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (world.student, world.teacher)]
    rows = datasets.Dataset.from_dict({"text": texts})
    return prepare_dataset(rows, *tokenizers, max_length=LENGTH, teacher_context=CONTEXT)


def of_trainer(world: World, texts: list[str | None]) -> Any:
    batch: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": 1}
    out = str(world.root / "python")
    args = VocAgnoConfig(out, max_length=LENGTH, use_cpu=True, report_to=["none"], **batch)
    rows = [{"text": text} for text in texts]
    trainer = VocAgnoTrainer(str(world.student), args, None, rows, teacher=str(world.teacher))
    return trainer.train_dataset


def of_command(world: World, texts: list[str | None]) -> Any:
    pages = world.root / "random.jsonl"
    pages.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"max_length": str(LENGTH), "global_batch_tokens": str(LENGTH), "eval_fraction": None}
    job = parse(world.argv("command", dataset=str(pages), use_cpu="True", **sizes))
    models = read_models(job.model, job.args, job.args.device)
    return pack_documents(job, models, read_corpora(job)).blocks


def sequences(blocks: Blocks) -> str:
    rows = [blocks[number] for number in range(len(blocks))]
    return json.dumps(rows, default=np.ndarray.tolist)


@given(texts=st.lists(TEXTS, max_size=8))
@settings(max_examples=15)
def test_packed_sequences_are_those_of_every_door(world: World, texts: list[str | None]) -> None:
    texts = [*texts, "1 + 1 = 2"]
    expected = of_prepare_dataset(world, texts)
    assert len(expected)
    for blocks in (of_trainer(world, texts), of_command(world, texts)):
        assert blocks.corpus_digest == expected.corpus_digest
        assert sequences(blocks) == sequences(expected)
