"""Alignment with stored teachers equals alignment with online teachers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from store_world import in_memory, random_store, write_store
from tokenizer_stubs import tokens_between
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import align_segment
from vocagnolm.corpus import load_corpus
from vocagnolm.data import MISSING, align_corpus
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, teacher_reader
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.store.read import StoredReader

Tokenizers = dict[str, PreTrainedTokenizerFast]
Row = dict[str, Any]
FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")
SHARED_COLUMNS = (
    *("document", "start", "end", "student_ids", "student_tokens", "teacher_tokens"),
    *(
        "student_codes",
        "student_exceptions",
        "teacher_codes",
        "teacher_exceptions",
        "unmapped_text_tokens",
    ),
)
LONG = ("Anna has 12 apples, buys 30 more and has 42. " * 5 + "\n\n") * 3
PAGES = [LONG, "naïve café 😀😀 数学 \u0301e" * 9, "short 25", "x" * 200, "a\n\n" * 90]


def student_of(tokenizers: Tokenizers, family: str, limit: int = 64) -> Reader:
    return Reader(tokenizers[family], 1, 2, limit)


def rows_of(texts: list[str], student: Reader, teacher: Any) -> list[Row]:
    return list(align_corpus(in_memory(texts), student, teacher).rows)


def columns(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    return [{name: row[name] for name in names} for row in rows]


# Documents that fit: a store is the teacher


# Each family as student and as teacher.
PAIRS = [*zip(FAMILIES, FAMILIES[1:] + FAMILIES[:1], strict=True), ("metaspace", "trimmed")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_alignment_from_a_store_equals_the_teachers(
    tokenizers_by_family: Tokenizers,
    fuzz_texts: Callable[..., list[str]],
    tmp_path: Path,
    pair: tuple[str, str],
) -> None:
    texts = [*fuzz_texts(60, seed=1), *fuzz_texts(15, seed=2, pieces=60), "short 25", "short 25"]
    student = student_of(tokenizers_by_family, pair[0], 1000)
    teacher = teacher_reader(tokenizers_by_family[pair[1]], 1200)
    stored = random_store(tmp_path / "store", texts, teacher.tokenizer, context=1200)
    online, offline = (
        align_corpus(in_memory(texts), student, reader)
        for reader in (teacher, StoredReader([stored]))
    )
    assert len(online.rows) > 50
    assert columns(list(offline.rows), SHARED_COLUMNS) == columns(list(online.rows), SHARED_COLUMNS)
    assert [document for document, _ in offline.skipped] == [n for n, _ in online.skipped]
    assert offline.mapped_text_fraction == online.mapped_text_fraction
    assert offline.digest() == online.digest()
    for row, same in zip(offline.rows, online.rows, strict=True):
        assert row["teacher_ids"] == same["teacher_losses"] == []
        document = stored.document(texts[row["document"]])
        assert np.isnan(row["teacher_losses"][0])
        assert row["teacher_losses"][1:] == document.losses.tolist()
    # Few teacher tokens fit, so that they decide what a block holds.
    packed = [Blocks(s.rows, 1000, 1200) for s in (online, offline)]
    numbers = [[b.segments(i).tolist() for i in range(len(b))] for b in packed]
    assert numbers[0] == numbers[1]
    assert max(map(len, numbers[0])) > 1


# Documents that do not fit: the student cuts, and the teacher's tokens go where their text goes


def slow_stored_row(text: str, row: Row, student: Reader, store: Store) -> Row:
    """Losses and ranges of a segment, one teacher token and one student token at a time."""
    document = store.document(text)
    assert document is not None
    tokens = [
        (max(first, row["start"]) - row["start"], min(last, row["end"]) - row["start"], loss)
        for (first, last), loss in zip(document.spans, document.losses.tolist(), strict=True)
        if first < row["end"] and last > row["start"]
    ]
    ours = tokens_between(student.tokenizer, text, row["start"], row["end"])
    ranges = []
    for first, last in ours.spans.tolist():
        covering = [n for n, (a, b, _) in enumerate(tokens, 1) if a < last and b > first]
        ranges.append((covering[0], covering[-1] + 1))
    end = row["end"] == len(text)
    return {
        "student_ids": [1, *ours.ids, *([2] if end else [])],
        "ranges": [[-1, -1], *map(list, ranges), *([[-1, -1]] if end else [])],
        "losses": [loss for *_, loss in tokens],
        "teacher_tokens": 1 + len(tokens),
    }


def assert_equals_slow(texts: list[str], rows: list[Row], student: Reader, store: Store) -> None:
    for row in rows:
        assert row["unmapped_text_tokens"] == 0
        assert np.isnan(row["teacher_losses"][0])
        (ranges,) = align_segment(row).tolist()
        found = {**row, "losses": row["teacher_losses"][1:], "ranges": ranges}
        expected = slow_stored_row(texts[row["document"]], row, student, store)
        assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("pair", [("metaspace", "nfc_digits"), ("unigram", "byte_level")])
def test_long_stored_documents_are_cut_by_the_student(
    tokenizers_by_family: Tokenizers,
    fuzz_texts: Callable[..., list[str]],
    tmp_path: Path,
    pair: tuple[str, str],
) -> None:
    texts = [*PAGES, *(text for text in fuzz_texts(40, seed=3, pieces=90) if text.strip())]
    student = student_of(tokenizers_by_family, pair[0], 24)
    store = random_store(tmp_path / "store", texts, tokenizers_by_family[pair[1]])
    rows = rows_of(texts, student, StoredReader([store]))
    for row, after in pairwise(rows):
        is_last = row["document"] < after["document"]
        assert row["end"] == (len(texts[row["document"]]) if is_last else after["start"])
    assert len(rows) > 5 * len(texts)
    assert_equals_slow(texts, rows, student, store)


def test_token_that_is_cut_belongs_to_both_sides(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    text = "x" * 200  # no white space: cut anywhere
    spans = np.array([[at, at + 40] for at in range(0, 200, 40)])
    losses = np.arange(5, dtype=np.float32)
    store = write_store(tmp_path / "store", [(text, StoredDocument(200, spans, losses))])
    student = student_of(tokenizers_by_family, "byte_level", 24)
    rows = rows_of([text], student, StoredReader([store]))
    cuts = [row["end"] for row in rows[:-1] if row["end"] % 40]
    assert cuts, "no cut is inside of a token"
    for row, after in pairwise(rows):
        if row["end"] in cuts:
            assert row["teacher_losses"][-1] == after["teacher_losses"][1] == row["end"] // 40
            assert align_segment(after)[0, 1, 0] == 1  # of the student's first text token


def test_no_segment_exceeds_the_teachers_context(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    tokenizer = tokenizers_by_family["nfc_digits"]
    store = random_store(tmp_path / "store", PAGES, tokenizer, context=20)
    student = student_of(tokenizers_by_family, "metaspace", 500)
    reader = StoredReader([store])
    rows = rows_of(PAGES, student, reader)
    assert max(row["teacher_tokens"] for row in rows) <= sum(reader.limits()) == 20
    assert_equals_slow(PAGES, rows, student, store)


def test_first_of_two_stores_has_the_narrower_context(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    tokenizer = tokenizers_by_family["nfc_digits"]
    stores = [
        random_store(tmp_path / f"{context}", PAGES, tokenizer, context=context)
        for context in (30, 20)
    ]
    assert StoredReader(stores).limits() == [30, 20]
    assert StoredReader(stores, first=True).limits() == [20]


# Several stores


def test_rows_hold_the_teachers_of_all_stores(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    families = ("nfc_digits", "byte_level", "prepend")
    stores = [
        random_store(tmp_path / f, PAGES, tokenizers_by_family[f], seed=n, context=30 + n)
        for n, f in enumerate(families)
    ]
    reader = StoredReader(stores)
    assert reader.limits() == [30, 31, 32]
    for row in rows_of(PAGES, student, reader):
        at, ranges = 0, align_segment(row).tolist()
        for n, store in enumerate(stores):
            expected = slow_stored_row(PAGES[row["document"]], row, student, store)
            own = row["teacher_losses"][at : at + expected["teacher_tokens"]]
            assert np.isnan(own[0])
            assert own[1:] == expected["losses"]
            assert len(own) <= reader.limits()[n]
            assert ranges[n] == expected["ranges"]
            at += len(own)
        assert row["teacher_tokens"] == len(row["teacher_losses"]) == at


def test_documents_that_one_store_lacks_are_skipped(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    student = student_of(tokenizers_by_family, "metaspace")
    tokenizer = tokenizers_by_family["byte_level"]
    texts = ["one", "two", "three", "four"]
    stores = [
        random_store(tmp_path / "a", ["one", "two", "three"], tokenizer),
        random_store(tmp_path / "b", ["four", "three", "one"], tokenizer),
    ]
    segments = align_corpus(in_memory(texts), student, StoredReader(stores))
    assert segments.rows["document"][:] == [0, 2]
    assert segments.skipped == [(1, MISSING), (3, MISSING)]


def test_first_store_of_a_document_is_its_teacher(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    parts = {"nfc_digits": PAGES[:2], "byte_level": PAGES[1:3]}
    stores = [
        random_store(tmp_path / family, texts, tokenizers_by_family[family], context=20)
        for family, texts in parts.items()
    ]
    segments = align_corpus(in_memory(PAGES), student, StoredReader(stores, first=True))
    assert segments.skipped == [(3, MISSING), (4, MISSING)]
    for document, store in enumerate((0, 0, 1)):
        rows = [row for row in segments.rows if row["document"] == document]
        alone = rows_of([PAGES[document]], student, StoredReader([stores[store]]))
        # NaN is not equal to itself.
        assert str(rows) == str([row | {"document": document} for row in alone])


@pytest.mark.parametrize("first", [True, False])
def test_missing_document_is_plain_text_where_asked(
    tokenizers_by_family: Tokenizers, tmp_path: Path, first: bool
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    tokenizer = tokenizers_by_family["byte_level"]
    stores = [
        random_store(tmp_path / "a", PAGES[:1], tokenizer, context=20),
        random_store(tmp_path / "b", PAGES[:2], tokenizer, context=20),
    ]
    reader = StoredReader(stores, first=first, plain=True)
    found, plain = rows_of(PAGES, student, reader), rows_of(PAGES, student, None)
    for document in range(len(PAGES)):
        rows, alone = ([r for r in x if r["document"] == document] for x in (found, plain))
        is_guided = document < (2 if first else 1)
        assert {row["unmapped_text_tokens"] > 0 for row in rows} == {not is_guided}
        if not is_guided:
            names = ("start", "end", "student_ids", "text_tokens", "unmapped_text_tokens")
            assert columns(rows, names) == columns(alone, names)
            assert all(row["teacher_counts"] == [1] * (1 if first else 2) for row in rows)
    others = [StoredReader(stores, first=a, plain=b) for a in (True, False) for b in (True, False)]
    assert len({other.fingerprint() for other in others}) == 4


# Other processes, and the cache


@pytest.mark.parametrize(
    ("name", "is_ignored"),
    [("dataset", True), ("server", True), ("probe_losses", True), ("context", False)],
)
def test_store_is_identified_by_its_content(name: str, is_ignored: bool, tmp_path: Path) -> None:
    document = StoredDocument(1, np.array([[0, 1]]), np.array([1.0], np.float32))
    store = write_store(tmp_path / "store", [("a", document)])
    before = store.fingerprint()
    store.manifest[name] = "another"
    assert (store.fingerprint() == before) is is_ignored


def test_reader_is_small_for_another_process(
    tokenizers_by_family: Tokenizers, tmp_path: Path
) -> None:
    store = random_store(tmp_path / "store", PAGES, tokenizers_by_family["byte_level"])
    reader = StoredReader([store, store])
    assert not reader.read([LONG])[1]  # the file is now memory-mapped
    sent = pickle.dumps(reader)
    assert len(sent) < 1000
    assert len(sent) < sum(path.stat().st_size for path in store.directory.iterdir()) / 10
    again = pickle.loads(sent)
    assert again.fingerprint() == reader.fingerprint()
    pairs = zip(again.read([LONG])[0], reader.read([LONG])[0], strict=True)
    for ours, theirs in pairs:
        assert np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.spans, theirs.spans)


@pytest.fixture
def corpus(tmp_path: Path) -> datasets.Dataset:
    texts = [*PAGES, *(f"Page {number} of it." for number in range(40)), "unknown"]
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return load_corpus(str(path))


@pytest.mark.processes
def test_alignment_is_the_same_by_two_processes(
    tokenizers_by_family: Tokenizers, corpus: datasets.Dataset, tmp_path: Path
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    store = random_store(tmp_path / "store", corpus["text"][:-1], tokenizers_by_family["trimmed"])
    alone = align_corpus(corpus, student, StoredReader([store]))
    copied = Store(store.directory)  # and without the cache of the first
    copied.manifest["teacher"] = "another fingerprint"
    shared = align_corpus(corpus, student, StoredReader([copied]), num_proc=2)
    assert shared.rows.cache_files != alone.rows.cache_files
    assert str(list(shared.rows)) == str(list(alone.rows))  # NaN is not equal to itself
    assert shared.skipped == alone.skipped == [(len(corpus) - 1, MISSING)]


def test_alignment_reads_the_cache_of_the_same_content(
    tokenizers_by_family: Tokenizers, corpus: datasets.Dataset, tmp_path: Path
) -> None:
    student, tokenizer = student_of(tokenizers_by_family, "metaspace"), tokenizers_by_family
    texts = corpus["text"][:-1]
    same, copy, other = (
        random_store(tmp_path / name, texts, tokenizer["trimmed"], seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    files = [
        align_corpus(corpus, student, StoredReader(stores)).rows.cache_files[0]["filename"]
        for stores in ([same], [copy], [other], [same, other], [other, same])
    ]
    assert files[0] == files[1]
    assert len(set(files)) == 4
