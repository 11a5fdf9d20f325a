"""Several stores that are one teacher, and a store that has grown, equal one store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_world import ABOUT, random_store, write_corpus
from world import World, assert_equal_weights, make_world

from vocagnolm import __main__
from vocagnolm.corpus import load_corpus
from vocagnolm.store.format import Store, by_teacher
from vocagnolm.store.read import StoredReader
from vocagnolm.training.options import ModelOptions


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    root = tmp_path_factory.mktemp("world")
    texts = [text[:120] for text in training_texts[:40]]
    world = make_world(root, tiny_llama, tokenizer_dirs, texts, initializer_range=0.1)
    write_corpus(root / "half.jsonl", texts[:20])
    write_corpus(root / "mixed.jsonl", [*texts[:10:-1], texts[0]])
    # A model's last bits depend on what else is in a batch, so each document has its own.
    world.score("whole", batch_tokens="1")
    for name, part in (("grown", "half"), ("half", "half"), ("mixed", "mixed")):
        world.score(name, dataset=str(root / f"{part}.jsonl"), batch_tokens="1")
    argv = ["--teacher", str(world.teacher), "--dataset", str(world.pages), "--batch_tokens=1"]
    sizes = ["--min_context=16", "--shard_documents=16", "--loss_dtype=float32"]
    assert __main__.main(["score", *argv, *sizes, f"--output_dir={root / 'grown'}"]) == 0
    return world


STORES = [["grown"], ["half", "mixed"], ["mixed", "half"]]


@pytest.mark.parametrize("names", STORES, ids=" ".join)
def test_run_is_the_same_from_a_grown_store_and_from_parts(
    world: World, tmp_path: Path, names: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"max_length": "128", "max_steps": "3", "learning_rate": "1e-2"}
    options |= {"eval_fraction": None, "save_steps": "9"}
    stores = [str(world.root / name) for name in names]
    whole = world.train(str(tmp_path / "w"), **options, teacher_losses=str(world.root / "whole"))
    capfd.readouterr()
    found = world.train(str(tmp_path / "p"), **options, teacher_losses=stores)
    assert f"teacher    {', '.join(stores)}: losses of {world.teacher}" in capfd.readouterr().out
    assert_equal_weights(found, whole)


@pytest.mark.parametrize("names", STORES, ids=" ".join)
def test_ranks_are_the_same_from_a_grown_store_and_from_parts(
    world: World, tmp_path: Path, names: list[str], tokenizers_by_family: dict[str, Any]
) -> None:
    texts = load_corpus(str(world.pages))["text"]
    random_store(tmp_path / "student", texts, tokenizers_by_family["metaspace"])
    ranks = []
    for number, stores in enumerate((["whole"], names)):
        out = tmp_path / str(number)
        argv = ["rank", f"--student_losses={tmp_path / 'student'}", f"--dataset={world.pages}"]
        argv += ["--teacher_losses", *(str(world.root / name) for name in stores)]
        assert __main__.main([*argv, f"--output_dir={out}"]) == 0
        ranks.append((out / "ranks.jsonl").read_bytes())
    assert ranks[0] == ranks[1]


# What a store holds, and what determines losses.
CONTENT: dict[str, Any] = {"dataset": "D", "dataset_documents": 5, "shard_documents": 2}
CONTENT |= {"server": "U", "versions": {"torch": "2"}, "documents": 5, "tokens": 9}
SETTINGS: dict[str, Any] = {"tokenizer_sha256": "b", "special_tokens": {"before": 1}}
SETTINGS |= {"teacher_revision": "b", "chat_template": "{{ x }}", "segmentation": "b"}
SETTINGS |= {"context": 9, "min_context": 9, "quantization": {"load_in_4bit": True}}
SETTINGS |= {"engine": "vllm", "dtype": "float32", "loss_dtype": "float32"}


@pytest.mark.parametrize("name", SETTINGS)
def test_stores_of_other_settings_have_another_teacher(name: str) -> None:
    before = ABOUT | {"teacher_revision": "a"}
    after = dict(reversed((before | CONTENT).items()))
    assert by_teacher([before, after, before | {name: SETTINGS[name]}]) == [[0, 1], [2]]


def test_teachers_are_counted_by_their_settings(
    tmp_path: Path, tokenizers_by_family: dict[str, Any]
) -> None:
    family = tokenizers_by_family["byte_level"]
    paths = []
    for number, (teacher, context) in enumerate((("A", 99), ("B", 99), ("A", 99), ("A", 98))):
        path = tmp_path / str(number)
        random_store(path, [str(number)], family, teacher=teacher, context=context)
        paths.append(str(path))
    assert ModelOptions(teacher_losses=paths).teachers == 3
    first, other, narrow = StoredReader([Store(Path(path)) for path in paths]).describe()
    assert "context was 99, now 98" in narrow
    assert "was" not in first + other
    # A missing store is reported when it is opened.
    assert ModelOptions(teacher_losses=["none", "nothing", paths[0]]).teachers == 3
    stores = [Store(path) for path in paths]
    reader = StoredReader(stores)
    assert reader.teachers == [[stores[0], stores[2]], [stores[1]], [stores[3]]]
    assert reader.limits() == [99, 99, 98]
    assert StoredReader(stores, first=True).limits() == [98]
