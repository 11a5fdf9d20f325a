"""Commands that train from stores: what the plan says, what is missing, resuming, evaluation."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_data import real_data
from store_world import write_store
from world import World, assert_equal_weights, make_world, save_model, write_pages

from vocagnolm import VocAgnoConfig, VocAgnoTrainer
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.run import parser
from vocagnolm.store.format import Store

SHORT: dict[str, Any] = {
    "max_length": "128",
    "max_steps": "3",
    "learning_rate": "1e-2",
    "eval_fraction": None,
    "save_steps": "9",
}


def in_float16(store: Store, texts: list[str], directory: Path) -> Store:
    """The same store with its losses rounded."""
    stored = [(text, store.document(text)) for text in dict.fromkeys(texts)]
    documents = [(text, document) for text, document in stored if document]
    context = store.manifest["context"]
    return write_store(directory, documents, context=context, loss_dtype="float16")


def selected(trainer: Any) -> torch.Tensor:
    """Which label tokens of all blocks, in order, are trained on."""
    chosen = []
    with torch.no_grad():
        for number in range(len(trainer.train_dataset)):
            batch = trainer.data_collator([trainer.train_dataset[number]])
            losses = trainer._student_losses(trainer.model, batch)
            is_label = batch["labels"] != IGNORED_LABEL
            teacher = trainer.token_objective.teacher_losses(batch)
            weights = trainer.token_objective.select(losses, batch, teacher).weight_BS
            chosen.append(weights[is_label] > 0)
    return torch.cat(chosen)


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """A world of documents that all models read whole, and a second teacher."""
    root = tmp_path_factory.mktemp("world")
    texts = [text[:120] for text in training_texts[:40]]
    save_model(root / "teacher2", tokenizer_dirs["byte_level"], tiny_llama(700, seed=2))
    return make_world(root, tiny_llama, tokenizer_dirs, texts, initializer_range=0.1)


@pytest.fixture
def error_of(world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`error_of(**options)`: the one line with which train.py stops."""

    def run(name: str = str(tmp_path / "new"), **changes: Any) -> str:
        capfd.readouterr()
        assert parser.main(world.argv(name, **SHORT, use_cpu="True", **changes)) == 2
        stderr = capfd.readouterr().err
        assert stderr.count("\n") == 1, stderr
        return stderr.removeprefix("vocagnolm train: error: ").strip()

    return run


def test_train_stops_or_skips_when_documents_are_missing(
    world: World, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    lines = world.pages.read_text().splitlines()
    lines[3] = json.dumps({"text": json.loads(lines[3])["text"] + " "})
    pages = tmp_path / "pages.jsonl"
    pages.write_text("\n".join([*lines[:20], json.dumps({"text": "new"}), *lines[20:]]) + "\n")
    options = {"dataset": str(pages), "teacher_losses": str(world.score())}
    error = error_of(**options)
    assert "2 of 41 documents" in error
    assert str(pages) in error
    assert not (tmp_path / "new").exists()
    world.train(str(tmp_path / "run"), **SHORT, **options, missing_losses="skip")
    skipped = (tmp_path / "run" / "skipped.jsonl").read_text().splitlines()
    assert [json.loads(line)["document"] for line in skipped] == [3, 20]


def test_each_domain_has_a_teacher_and_the_rest_none(
    world: World,
    training_texts: list[str],
    tmp_path: Path,
    error_of: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    code, rest = tmp_path / "code.jsonl", tmp_path / "rest.jsonl"
    write_pages(code, [text[:120] for text in training_texts[50:60]])
    write_pages(rest, [text[:120] for text in training_texts[60:65]])
    store = world.score()
    other = world.score("code", teacher=str(world.root / "teacher2"), dataset=str(code))
    options: dict[str, Any] = {"teacher_losses": [str(other), str(store)]}
    options |= {**SHORT, "teacher_reduction": "first"}

    def mapped(name: str, *corpora: Path, **changes: str) -> float:
        capfd.readouterr()
        datasets = [str(corpus) for corpus in corpora]
        world.train(str(tmp_path / name), **options, dataset=datasets, **changes)
        printed = capfd.readouterr().out
        assert f"{store}: losses of {Store(store).manifest['teacher']}" in printed
        found = re.search(r"([\d.]+)% .*mapped", printed)
        assert found
        return float(found[1])

    # Only the second store has the pages.
    alone = world.train(str(tmp_path / "alone"), **SHORT, teacher_losses=str(store))
    assert_equal_weights(world.train(str(tmp_path / "both"), **options), alone)
    assert mapped("domains", world.pages, code) == 100
    corpora = (world.pages, code, rest)
    several = {"teacher_losses": options["teacher_losses"], "teacher_reduction": "first"}
    assert "5 of 5 documents" in error_of(**several, dataset=[str(corpus) for corpus in corpora])
    assert 80 < mapped("all", *corpora, missing_losses="plain") < 99


def test_evaluation_of_stored_run_equals_online_run(
    world: World, training_texts: list[str], tmp_path: Path
) -> None:
    write_pages(tmp_path / "eval.jsonl", training_texts[50:60])  # in no store
    options = SHORT | {"eval_dataset": str(tmp_path / "eval.jsonl"), "eval_steps": "1"}
    losses = []
    for name, store in (("online", {}), ("stored", {"teacher_losses": str(world.score())})):
        world.train(str(tmp_path / name), **options, **store)
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        losses.append(
            [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
        )
    # Documents in no store are packed without regard to a teacher, so into other blocks.
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(set(losses[0])) == 3


def test_run_is_resumed_from_the_same_content_only(
    world: World, tmp_path: Path, error_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(world.score(), tmp_path / "store"))
    options = SHORT | {"save_steps": "2"}
    whole = world.train(str(tmp_path / "whole"), **options, teacher_losses=str(store))
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", run / "checkpoint-2")
    shutil.copy(tmp_path / "whole" / "run.json", run)
    other = world.score("rounded", loss_dtype="float16")
    shutil.rmtree(store)
    shutil.copytree(other, store)
    assert "teacher_losses" in error_of(str(run), teacher_losses=str(store))
    assert "teacher_losses" in error_of(str(run), teacher_losses=str(other))
    shutil.rmtree(store)
    shutil.copytree(world.score(), store)
    monkeypatch.chdir(tmp_path)
    # A scheduler may give the next start another scratch directory.
    (tmp_path / "disk2").mkdir()
    store.rename(tmp_path / "disk2" / "store")
    resumed = world.train(str(run), **options, teacher_losses="disk2/store")
    assert_equal_weights(resumed, whole)


@pytest.mark.slow
def test_stored_run_equals_online_run_on_real_text(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    """Short documents of GSM8K and PlanetMath, and the tokenizers of the paper."""
    texts: list[str] = []
    for name, count in (("gsm8k_train", 12), ("planetmath", 3)):
        lines = real_data(f"data/corpora/{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts += [t for t in (json.loads(line)["text"] for line in lines) if len(t) < 900][:count]
    world = World(tmp_path, tmp_path / "student", tmp_path / "teacher", tmp_path / "pages.jsonl")
    for place, name in ((world.student, "tinyllama"), (world.teacher, "qwen2.5")):
        tokenizer = real_data(f"tokenizers/{name}")
        size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
        tiny = tiny_llama(size, len(name), **shape, max_position_embeddings=512)
        with torch.no_grad():
            for parameter in tiny.parameters():
                parameter.mul_(5)  # losses far from uniform
        save_model(place, tokenizer, tiny)
    write_pages(world.pages, texts)
    store = world.score()
    rounded = in_float16(Store(store), texts, tmp_path / "float16").directory

    def build(teacher: Path) -> Any:
        options: dict[str, Any] = {"max_length": 512, "global_batch_tokens": 1024, "max_steps": 2}
        options |= {"learning_rate": 1e-2, "use_cpu": True, "report_to": ["none"]}
        args = VocAgnoConfig(str(tmp_path / f"run_{teacher.name}"), **options)
        return VocAgnoTrainer(str(world.student), args, None, world.rows(), teacher=str(teacher))

    trainers = [build(teacher) for teacher in (world.teacher, store, rounded)]
    masks = [selected(trainer) for trainer in trainers]
    assert torch.equal(masks[0], masks[1])
    assert (masks[0] == masks[2]).double().mean() >= 0.999
    assert 0.4 < masks[0].double().mean() < 0.5
    for trainer in trainers[:2]:
        trainer.train()
    online, stored = (trainer.model.state_dict() for trainer in trainers[:2])
    assert_equal_weights(stored, online)
