"""The store's format: what it gives back, what older stores are, and how damage is found."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
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
    is_written,
    manifest_of,
    shard_name,
    write_shard,
)

TEXTS = ["first 😀", "b", "数学 2025", "first 😀", "another document", "x" * 300, "last"]
TRAILING_ZERO = next(str(i) for i in itertools.count() if not document_key(str(i))[-1])
OLD_STORE = Path(__file__).parents[1] / "data/store"


def stored_of(text: str, seed: int) -> tuple[bytes, StoredDocument]:
    """A document with a token per character and made-up losses that float16 holds."""
    rng = np.random.default_rng([seed, len(text)])
    ends = np.arange(1, len(text) + 1)
    spans = np.stack([ends - 1, ends], axis=-1)
    losses = rng.random(len(text)).astype(np.float16).astype(np.float32)
    return document_key(text), StoredDocument(len(text), spans, losses)


def about(seed: int) -> dict[str, Any]:
    """The minimum that a store's manifest says."""
    return {"teacher": f"teacher {seed}", "tokenizer_sha256": "", "context": 99}


def make_store(directory: Path, texts: Sequence[str] = TEXTS, *, seed: int = 0) -> Path:
    """A store of shards of three documents."""
    directory.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, len(texts), 3)):
        documents = [stored_of(text, seed) for text in texts[first : first + 3]]
        write_shard(directory, number, documents, "float16")
    finish_store(directory, about(seed))
    return directory


def as_lists(document: StoredDocument | None) -> list[Any]:
    assert document is not None
    return [document.length, document.spans.tolist(), document.losses.tolist()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store; read-only by convention."""
    return make_store(tmp_path_factory.mktemp("store") / "S")


# Reading


def test_store_gives_back_what_was_written(finished: Path) -> None:
    assert list(contents(finished)) == ["manifest.json", *map(shard_name, range(3))]
    opened = Store(finished)
    for text in TEXTS:
        assert as_lists(opened.document(text)) == as_lists(stored_of(text, 0)[1])
    assert opened.document("absent") is None
    assert opened.document("") is None
    manifest = opened.manifest
    assert manifest["documents"] == 7
    assert manifest["tokens"] == sum(map(len, TEXTS))
    assert manifest["teacher"] == "teacher 0"


def test_store_of_version_0_1_is_read() -> None:
    """Its fingerprint is the same, too, so that runs resume and the cache is found."""
    expected = json.loads((OLD_STORE / "expected.json").read_text(encoding="utf-8"))
    opened = Store(OLD_STORE)
    for row in expected["documents"]:
        lists = [len(row["text"]), row["spans"], row["losses"]]
        assert as_lists(opened.document(row["text"])) == lists
    assert opened.fingerprint() == expected["fingerprint"]
    assert not find_faults(OLD_STORE, opened.manifest[SHARDS], by_hash=True)


def test_key_that_ends_in_zero_is_found(tmp_path: Path) -> None:
    """NumPy drops zeros at the end of a string."""
    opened = Store(make_store(tmp_path / "S", [TRAILING_ZERO, "another"]))
    assert as_lists(opened.document(TRAILING_ZERO))


def test_first_copy_of_a_repeated_document_is_taken(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path, number, [stored_of("twice", number)], "float16")
    finish_store(tmp_path, about(0))
    assert as_lists(Store(tmp_path).document("twice")) == as_lists(stored_of("twice", 0)[1])


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_empty_shards_hold_no_documents(tmp_path: Path, shards: int) -> None:
    for number in range(shards):
        write_shard(tmp_path, number, [], "float16")
    finish_store(tmp_path, about(0))
    opened = Store(tmp_path)
    assert opened.manifest["tokens"] == 0
    assert opened.document("text") is None


def test_documents_without_tokens_are_found_and_counted(tmp_path: Path) -> None:
    empty = StoredDocument(1, np.empty((0, 2), np.int64), np.empty(0, np.float32))
    documents = [stored_of("text", 0), (document_key("a"), empty), (document_key("b"), empty)]
    write_shard(tmp_path, 0, documents, "float16")
    finish_store(tmp_path, about(0))
    opened = Store(tmp_path)
    assert as_lists(opened.document("a")) == [1, [], []]
    assert (opened.manifest["documents"], opened.manifest["unscored"]) == (3, 2)


def test_store_opens_with_datasets_when_it_is_anywhere(finished: Path, tmp_path: Path) -> None:
    files = sorted(map(str, finished.glob("*.arrow")))
    rows = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path))
    assert rows.column_names == ["document", "start", "end", "codes", "exceptions", "losses"]
    assert sum(map(len, rows["losses"])) == sum(map(len, TEXTS))
    assert rows[0]["document"] == document_key(TEXTS[0])


def test_token_takes_about_three_bytes(tmp_path: Path) -> None:
    texts = [f"{number} {'x' * 500}" for number in range(40)]
    write_shard(tmp_path, 0, [stored_of(text, 0) for text in texts], "float16")
    size = (tmp_path / shard_name(0)).stat().st_size
    assert 3.0 < size / sum(map(len, texts)) < 3.25


# Writing


@pytest.mark.parametrize("has_links", [True, False])
def test_shard_stays_when_another_job_was_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    def reject(*_: Any) -> None:
        raise PermissionError(1, "no hard links here")

    if not has_links:
        monkeypatch.setattr(os, "link", reject)
    for seed in (0, 1):
        write_shard(tmp_path, 0, [stored_of("text", seed)], "float32")
    finish_store(tmp_path, about(0))
    assert as_lists(Store(tmp_path).document("text")) == as_lists(stored_of("text", 0)[1])
    assert list(contents(tmp_path)) == [MANIFEST_FILE, shard_name(0)]


@pytest.mark.parametrize("at", ["before the link", "after the link"])
def test_finished_store_stays_when_another_job_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    make_store(tmp_path)
    before, link = contents(tmp_path), os.link

    def link_late(source: Any, target: Any) -> None:
        if at == "before the link":  # the first job ends, and removes the other one's file
            finish_store(tmp_path, about(0))
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    write_shard(tmp_path, 0, [stored_of(TEXTS[0], seed=9)], "float16")
    begin_store(tmp_path, about(1))
    finish_store(tmp_path, about(0))
    assert contents(tmp_path) == before


def test_shard_is_written_if_of_the_same_texts(tmp_path: Path) -> None:
    assert not is_written(tmp_path, 0, ["text"])
    write_shard(tmp_path, 0, [stored_of("text", 0)], "float16")
    assert is_written(tmp_path, 0, ["text"])
    with pytest.raises(ValueError, match=r"shard-00000\.arrow was made from other documents"):
        is_written(tmp_path, 0, ["another"])


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
            with pytest.raises(ValueError, match=f"damaged, 1 of 3 shards: {path.name}"):
                Store(directory)
        path.write_bytes(good)
    path.unlink()
    with pytest.raises(ValueError, match=path.name):
        Store(directory)


STRANGE = {
    "no manifest": (None, "", "not a finished"),
    "unfinished": (f'"{SHARDS}"', '"others"', "not a finished"),
    "another format": ('"format": 1', '"format": 2', "format 1"),
    "not JSON": ("{", "", MANIFEST_FILE),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_manifest_is_no_store(finished: Path, tmp_path: Path, name: str) -> None:
    old, new, word = STRANGE[name]
    if old:
        content = (finished / MANIFEST_FILE).read_text()
        (tmp_path / MANIFEST_FILE).write_text(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=word):
        Store(tmp_path)
