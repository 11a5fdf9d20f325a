"""The store's format: what it gives back, what a kill leaves of it, and how damage is found."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from score_world import contents

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


# Spans


@pytest.mark.parametrize("spans", [[[0, 2], [3, 4]], [[1, 2]], [[0, 3], [0, 2]]])
def test_spans_with_a_gap_are_rejected(spans: list[list[int]], tmp_path: Path) -> None:
    document = StoredDocument(4, np.array(spans), np.zeros(len(spans), np.float32))
    with pytest.raises(ValueError, match="gap"):
        write_shard(tmp_path, 0, [(document_key("abcd"), document)], "float16")


@pytest.mark.parametrize("spans", [[[0, 2], [2, 5]], [[0, 2], [2, 3]]])
def test_spans_that_do_not_cover_the_text_are_rejected(
    spans: list[list[int]], tmp_path: Path
) -> None:
    document = StoredDocument(4, np.array(spans), np.zeros(2, np.float32))
    write_shard(tmp_path, 0, [(document_key("abcd"), document)], "float16")
    finish_store(tmp_path, about(0))
    with pytest.raises(ValueError, match="spans from"):
        Store(tmp_path).document("abcd")


def test_token_takes_about_three_bytes(tmp_path: Path) -> None:
    texts = [f"{number} {'x' * 500}" for number in range(40)]
    rows = [stored_of(text, 0) for text in texts]
    write_shard(tmp_path, 0, rows, "float16")
    size = (tmp_path / shard_name(0)).stat().st_size
    assert 3.0 < size / sum(map(len, texts)) < 3.25


# Stores


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


def make_store(
    directory: Path, texts: Sequence[str] = TEXTS, *, seed: int = 0, **description: Any
) -> Path:
    """A store of shards of three documents."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = [texts[first : first + 3] for first in range(0, len(texts), 3)]
    for number, shard in enumerate(shards):
        write_shard(directory, number, [stored_of(text, seed) for text in shard], "float16")
    finish_store(directory, about(seed) | description)
    return directory


def as_lists(document: StoredDocument | None) -> list[Any]:
    assert document is not None
    return [document.length, document.spans.tolist(), document.losses.tolist()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store; read-only by convention."""
    return make_store(tmp_path_factory.mktemp("store") / "S")


def test_store_gives_back_what_was_written(finished: Path) -> None:
    assert list(contents(finished)) == [
        "manifest.json", *(shard_name(number) for number in range(3))
    ]  # fmt: skip
    opened = Store(finished)
    for text in TEXTS:
        assert as_lists(opened.document(text)) == as_lists(stored_of(text, 0)[1])
    assert opened.document("absent") is None
    assert opened.document("") is None
    manifest = opened.manifest
    assert manifest["documents"] == 7
    assert manifest["tokens"] == sum(map(len, TEXTS))
    assert manifest["teacher"] == "teacher 0"


def test_key_that_ends_in_zero_is_found(tmp_path: Path) -> None:
    """NumPy drops zeros at the end of a string."""
    opened = Store(make_store(tmp_path / "S", [TRAILING_ZERO, "another"]))
    assert as_lists(opened.document(TRAILING_ZERO))


def test_document_stored_in_part_is_damage(tmp_path: Path) -> None:
    _, part = stored_of("a whole", 0)
    write_shard(tmp_path, 0, [(document_key("a whole document"), part)], "float16")
    finish_store(tmp_path, about(0))
    with pytest.raises(ValueError, match=r"is damaged .*7 of 16 characters.*'a whole document'"):
        Store(tmp_path).document("a whole document")
    assert Store(tmp_path).document("a whole") is None


def test_row_that_begins_within_its_document_is_damage(finished: Path) -> None:
    """A store with several rows for a document, which nothing writes, is not read in part."""
    opened = Store(finished)
    assert opened.document(TEXTS[1])
    starts = pa.array([1] * len(opened._table), pa.int32())
    opened._table = opened._table.set_column(1, "start", starts)
    with pytest.raises(ValueError, match=r"is damaged .*begins at character 1, not at 0"):
        opened.document(TEXTS[1])


def test_first_copy_of_a_repeated_document_is_taken(tmp_path: Path) -> None:
    for number in range(3):
        write_shard(tmp_path, number, [stored_of("twice", number)], "float16")
    finish_store(tmp_path, about(0))
    expected = as_lists(stored_of("twice", 0)[1])
    assert as_lists(Store(tmp_path).document("twice")) == expected


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_empty_shards_hold_no_documents(tmp_path: Path, shards: int) -> None:
    for number in range(shards):
        write_shard(tmp_path, number, [], "float16")
    finish_store(tmp_path, about(0))
    opened = Store(tmp_path)
    assert opened.manifest["tokens"] == 0
    assert opened.document("text") is None


def test_stored_document_without_tokens_is_found(tmp_path: Path) -> None:
    empty = StoredDocument(4, np.empty((0, 2), np.int64), np.empty(0, np.float32))
    write_shard(tmp_path, 0, [(document_key("text"), empty)], "float16")
    finish_store(tmp_path, about(0))
    assert as_lists(Store(tmp_path).document("text")) == [4, [], []]


def test_documents_without_tokens_are_counted(tmp_path: Path) -> None:
    none = np.empty((0, 2), np.int64), np.empty(0, np.float32)
    empty = [(document_key(text), StoredDocument(1, *none)) for text in "ab"]
    write_shard(tmp_path, 0, [stored_of("text", 0), *empty], "float16")
    finish_store(tmp_path, about(0))
    manifest = Store(tmp_path).manifest
    assert (manifest["documents"], manifest["unscored"]) == (3, 2)


def test_store_opens_with_datasets_when_it_is_anywhere(finished: Path, tmp_path: Path) -> None:
    files = sorted(map(str, finished.glob("*.arrow")))
    rows = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path))
    assert len(rows) == 7
    assert rows.column_names == ["document", "start", "end", "codes", "exceptions", "losses"]
    assert sum(map(len, rows["losses"])) == sum(map(len, TEXTS))
    assert rows[0]["document"] == document_key(TEXTS[0])


# Writing


def test_shard_stays_when_another_job_was_first(tmp_path: Path) -> None:
    first, second = ([stored_of("text", seed)] for seed in (0, 1))
    path = tmp_path / shard_name(0)
    write_shard(tmp_path, 0, first, "float32", replace=False)
    before = path.read_bytes()
    write_shard(tmp_path, 0, second, "float32", replace=False)
    assert path.read_bytes() == before
    write_shard(tmp_path, 0, second, "float32")
    assert path.read_bytes() != before


def test_shard_stays_when_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reject(*_: Any) -> None:
        raise PermissionError(1, "no hard links here")

    monkeypatch.setattr(os, "link", reject)
    test_shard_stays_when_another_job_was_first(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


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
    late = [stored_of(TEXTS[0], seed=9)]
    write_shard(tmp_path, 0, late, "float16", replace=False)
    begin_store(tmp_path, about(1))
    finish_store(tmp_path, about(0))
    assert contents(tmp_path) == before


def test_shard_is_written_if_of_the_same_texts(tmp_path: Path) -> None:
    assert not is_written(tmp_path, 0, ["text"])
    write_shard(tmp_path, 0, [stored_of("text", 0)], "float16")
    assert is_written(tmp_path, 0, ["text"])
    with pytest.raises(ValueError, match=r"shard-00000\.arrow was made from other documents"):
        is_written(tmp_path, 0, ["another"])
    (tmp_path / shard_name(0)).write_bytes(b"no shard")
    with pytest.raises(ValueError, match=r"shard-00000\.arrow is damaged.*: delete it"):
        is_written(tmp_path, 0, ["text"])


class Killed(BaseException):
    """Ends what runs as SIGKILL would: no code of the package catches it."""


class Killer:
    """Counts what changes a directory, and kills before or after one of those operations."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, *, before: bool):
        self.operations = 0
        self._at, self._before = at, before
        self._undo = monkeypatch
        self._wrap(os, "link")
        self._wrap(os, "fsync")
        for name in ("replace", "unlink", "open"):
            self._wrap(Path, name)

    def _wrap(self, owner: Any, name: str) -> None:
        original = getattr(owner, name) if name != "fsync" else int  # a real one would take long

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "w" not in str(args[1:]):
                return original(*args, **kwargs)
            self.operations += 1
            is_last = self.operations == self._at
            if is_last and self._before:
                raise Killed
            result = original(*args, **kwargs)
            if is_last:
                raise Killed
            return result

        self._undo.setattr(owner, name, wrapped)


def score_all(directory: Path) -> list[int]:
    """Do what a scoring job does with the store; return the shards that it wrote."""
    begin_store(directory, about(0))
    wrote = []
    for number in range(3):
        text = f"text {number}"
        if not is_written(directory, number, [text]):
            wrote.append(number)
            write_shard(directory, number, [stored_of(text, 0)], "float16", replace=False)
    finish_store(directory, about(0))
    return wrote


def test_store_is_the_same_when_writing_was_killed(tmp_path: Path) -> None:
    """Exhaustive: before and after every operation on the directory, until none is left."""
    assert score_all(tmp_path / "whole") == [0, 1, 2]
    expected = contents(tmp_path / "whole")
    for step in itertools.count(2):
        at, before = step // 2, step % 2 == 0
        directory = tmp_path / f"{at} {before}"
        with pytest.MonkeyPatch.context() as patch:
            killer = Killer(patch, at, before=before)
            try:
                score_all(directory)
            except Killed:
                pass
            else:
                assert killer.operations < at
                break
        visible = {path.name for path in directory.glob("*.arrow")}
        for name in visible:  # whole, or not there
            assert (directory / name).read_bytes() == expected[name]
        assert not {shard_name(number) for number in score_all(directory)} & visible
        assert contents(directory) == expected
        assert not list(directory.glob(".shard-*"))
    assert at > 15


# Damage


def flip_a_bit(rng: random.Random, path: Path, _: Path) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng: random.Random, path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def append(rng: random.Random, path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.choice([b"\x00", b"\n", rng.randbytes(99)]))


def delete(rng: random.Random, path: Path, _: Path) -> None:
    path.unlink()


def take_anothers(rng: random.Random, path: Path, other: Path) -> None:
    shutil.copyfile(other / path.name, path)


@pytest.mark.parametrize(
    ("damage", "times"),
    [(flip_a_bit, 300), (truncate, 50), (append, 20), (delete, 5), (take_anothers, 5)],
)
def test_verify_finds_any_damaged_byte(
    finished: Path, tmp_path: Path, damage: Callable[..., None], times: int
) -> None:
    rng, other = random.Random(damage.__name__), make_store(tmp_path / "other", seed=1)
    directory = tmp_path / "S"
    shutil.copytree(finished, directory)
    shards = manifest_of(directory)[SHARDS]
    for _ in range(times):
        path = rng.choice(sorted(directory.glob("*.arrow")))
        good = path.read_bytes()
        damage(rng, path, other)
        assert list(find_faults(directory, shards, by_hash=True)) == [path.name]
        if damage in (truncate, append, delete):
            with pytest.raises(ValueError, match=f"damaged, 1 of 3 shards: {path.name} (is|has)"):
                Store(directory)
        path.write_bytes(good)
    assert not find_faults(directory, shards, by_hash=True)


def test_unfinished_and_strange_manifests_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a finished teacher-loss store.*vocagnolm score"):
        Store(tmp_path)
    begin_store(tmp_path, about(0))
    with pytest.raises(ValueError, match="not a finished teacher-loss store"):
        Store(tmp_path)
    make_store(tmp_path)
    path = tmp_path / MANIFEST_FILE
    content = path.read_text()
    for old, new, message in (
        ('"format": 1', '"format": 2', "has format 2, not 1"),
        ('"format": 1', '"about": 1', "is not the manifest of a teacher-loss store"),
        ("shard-00001", "../shard-00001", "names ../shard-00001.arrow, which is a path"),
        ("{", "", "is not JSON"),
    ):
        path.write_text(content.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            Store(tmp_path)


def test_document_is_absent_when_its_text_was_changed(finished: Path) -> None:
    opened, rng = Store(finished), random.Random(0)
    for _ in range(200):
        text = rng.choice(TEXTS)
        at = rng.randrange(len(text))
        other = rng.choice(["", "é", " ", text[at] * 2, text[at].swapcase() + "\u0308"])
        changed = text[:at] + other + text[at + 1 :]
        assert (opened.document(changed) is None) == (changed not in TEXTS)
