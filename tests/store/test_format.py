"""The store's format: what it gives back, what older stores are, and how damage is found."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from store_world import contents

from vocagnolm.store.format import (
    MANIFEST_FILE,
    SHARDS,
    Store,
    StoredDocument,
    begin_store,
    document_key,
    find_faults,
    finish_store,
    manifest_of,
    shard_name,
    write_shard,
)

TRAILING_ZERO = next(str(i) for i in itertools.count() if not document_key(str(i))[-1])
TEXTS = ["first 😀", "b", "数学 2025", "first 😀", "another document", "x" * 300, "last"]
UNSCORED = "no tokens"
SHARDS_OF_TEXTS = st.lists(
    st.lists(st.sampled_from([*TEXTS, TRAILING_ZERO, UNSCORED]), max_size=4), max_size=4
)
OLD_STORE = Path(__file__).parents[1] / "data/store"
ABOUT: dict[str, Any] = {"teacher": "T", "tokenizer_sha256": "", "context": 99}


def stored_of(text: str, seed: int) -> tuple[bytes, StoredDocument]:
    """A document with a token per character and made-up losses that float16 holds."""
    rng = np.random.default_rng([seed, len(text)])
    ends = np.arange(1, len(text) + 1 if text != UNSCORED else 1)
    spans = np.stack([ends - 1, ends], axis=-1)
    losses = rng.random(len(ends)).astype(np.float16).astype(np.float32)
    return document_key(text), StoredDocument(len(text), spans, losses)


def make_store(directory: Path, shards: Sequence[Sequence[str]]) -> Store:
    """A store of which each shard has losses of its own."""
    for number, texts in enumerate(shards):
        documents = [stored_of(text, number) for text in texts]
        write_shard(directory, number, documents, "float16")
    finish_store(directory, ABOUT)
    return Store(directory)


def as_lists(document: StoredDocument | None) -> list[Any]:
    assert document is not None
    return [document.length, document.spans.tolist(), document.losses.tolist()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store of three shards; read-only by convention."""
    directory = tmp_path_factory.mktemp("store")
    make_store(directory, [TEXTS[:3], TEXTS[3:6], TEXTS[6:]])
    return directory


# Reading


@given(SHARDS_OF_TEXTS)
@example([])
@example([[], []])
@example([[TRAILING_ZERO, "another"]])  # NumPy drops zeros at the end of a string
@example([["twice"], ["twice"], [UNSCORED]])
def test_store_gives_back_the_first_copy_of_what_was_written(shards: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        opened = make_store(Path(root), shards)
        assert list(contents(Path(root))) == [MANIFEST_FILE, *map(shard_name, range(len(shards)))]
        expected: dict[str, list[Any]] = {}
        for number, texts in enumerate(shards):
            for text in texts:
                expected.setdefault(text, as_lists(stored_of(text, number)[1]))
        assert {text: as_lists(opened.document(text)) for text in expected} == expected
        assert opened.document("absent") is None
        assert opened.document("") is None
        manifest = opened.manifest
    written = [text for texts in shards for text in texts]
    assert manifest["documents"] == sum(len(set(texts)) for texts in shards)
    assert manifest["tokens"] == sum(len(text) for text in written if text != UNSCORED)
    assert manifest["unscored"] == sum(UNSCORED in texts for texts in shards)
    assert manifest["teacher"] == "T"


def test_store_of_version_0_1_is_read() -> None:
    """Its fingerprint is the same, too, so that runs resume and the cache is found."""
    expected = json.loads((OLD_STORE / "expected.json").read_text(encoding="utf-8"))
    opened = Store(OLD_STORE)
    for row in expected["documents"]:
        lists = [len(row["text"]), row["spans"], row["losses"]]
        assert as_lists(opened.document(row["text"])) == lists
    assert opened.fingerprint() == expected["fingerprint"]
    assert not find_faults(OLD_STORE, opened.manifest[SHARDS], by_hash=True)


def test_datasets_reads_shards_of_about_three_bytes_a_token(tmp_path: Path) -> None:
    texts = [f"{number} {'x' * 500}" for number in range(40)]
    make_store(tmp_path, [texts])
    (shard,) = tmp_path.glob("*.arrow")
    cache = str(tmp_path / "cache")
    rows = datasets.load_dataset("arrow", data_files=str(shard), split="train", cache_dir=cache)
    assert rows["document"] == [document_key(text) for text in texts]
    tokens = sum(map(len, rows["losses"]))
    assert tokens == sum(map(len, texts))
    assert 3.0 < shard.stat().st_size / tokens < 3.25


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [("dataset", True), ("server", True), ("probe_losses", True), ("context", False)],
)
def test_store_is_identified_by_its_content(name: str, is_ignored: bool, finished: Path) -> None:
    store = Store(finished)
    before = store.fingerprint()
    store.manifest[name] = "another"
    assert (store.fingerprint() == before) is is_ignored


# Writing


@pytest.mark.parametrize("at", ["before the link", "after the link", "without links"])
def test_finished_store_stays_when_another_job_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    make_store(tmp_path, [["text"]])
    before, link = contents(tmp_path), os.link

    def link_late(source: Any, target: Any) -> None:
        if at == "without links":
            raise PermissionError(1, "no hard links here")
        if at == "before the link":  # the first job ends, and removes the other one's file
            finish_store(tmp_path, ABOUT)
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    write_shard(tmp_path, 0, [stored_of("text", seed=9)], "float16")
    begin_store(tmp_path, ABOUT | {"teacher": "another"})
    finish_store(tmp_path, ABOUT)
    assert contents(tmp_path) == before


# Damage


def flipped(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def truncated(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


@pytest.mark.parametrize(("damage", "times"), [(flipped, 300), (truncated, 50)])
def test_verify_finds_any_damaged_byte(
    finished: Path, tmp_path: Path, damage: Callable[[random.Random, bytes], bytes], times: int
) -> None:
    rng, directory = random.Random(damage.__name__), tmp_path / "S"
    shutil.copytree(finished, directory)
    shards = manifest_of(directory)[SHARDS]
    for _ in range(times):
        path = rng.choice(sorted(directory.glob("*.arrow")))
        good = path.read_bytes()
        path.write_bytes(damage(rng, good))
        assert list(find_faults(directory, shards, by_hash=True)) == [path.name]
        if damage is truncated:
            with pytest.raises(ValueError, match=f"1 of 3 shards.*{path.name}"):
                Store(directory)
        path.write_bytes(good)
    path.unlink()
    with pytest.raises(ValueError, match=path.name):
        Store(directory)


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("{", "", MANIFEST_FILE),
        (f'"{SHARDS}"', '"others"', "not a finished"),
        ('"format": 1', '"format": 2', "format 1"),
    ],
)
def test_strange_manifest_is_not_a_store(
    finished: Path, tmp_path: Path, old: str, new: str, word: str
) -> None:
    with pytest.raises(ValueError, match="not a finished"):
        Store(tmp_path)
    content = (finished / MANIFEST_FILE).read_text()
    (tmp_path / MANIFEST_FILE).write_text(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=word):
        Store(tmp_path)
