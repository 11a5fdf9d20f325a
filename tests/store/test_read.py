"""Alignment with stored teachers equals alignment with online teachers."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from store_world import in_memory, random_store, write_corpus, write_store
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
# What only an online teacher or only a store fills.
TEACHER_COLUMNS = ("teacher_ids", "teacher_losses")
LONG = ("Anna has 12 apples, buys 30 more and has 42. " * 5 + "\n\n") * 3
PAGES = [LONG, "naïve café 😀😀 数学 \u0301e" * 9, "short 25", "x" * 200, "a\n\n" * 90]


def student_of(tokenizers: Tokenizers, family: str, limit: int = 64) -> Reader:
    return Reader(tokenizers[family], 1, 2, limit)


def rows_of(texts: list[str], student: Reader, teacher: Any) -> list[Row]:
    return list(align_corpus(in_memory(texts), student, teacher).rows)


def without(rows: datasets.Dataset, names: tuple[str, ...]) -> list[Row]:
    return rows.remove_columns(names).to_list()


@pytest.fixture
def store_of(tokenizers_by_family: Tokenizers, tmp_path: Path) -> Callable[..., Store]:
    """`store_of(family, texts=PAGES, **options)`: another store of random losses."""
    numbers = itertools.count()

    def build(family: str, texts: Sequence[str] = PAGES, **options: Any) -> Store:
        directory = tmp_path / f"store{next(numbers)}"
        return random_store(directory, texts, tokenizers_by_family[family], **options)

    return build


# Documents that fit: a store is the teacher


# Each family as student and as teacher.
PAIRS = [*zip(FAMILIES, FAMILIES[1:] + FAMILIES[:1], strict=True), ("metaspace", "trimmed")]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_alignment_from_a_store_equals_the_teachers(
    tokenizers_by_family: Tokenizers,
    fuzz_texts: Callable[..., list[str]],
    store_of: Callable[..., Store],
    pair: tuple[str, str],
) -> None:
    texts = [*fuzz_texts(60, seed=1), *fuzz_texts(15, seed=2, pieces=60), "short 25", "short 25"]
    student = student_of(tokenizers_by_family, pair[0], 1000)
    teacher = teacher_reader(tokenizers_by_family[pair[1]], 1200)
    stored = store_of(pair[1], texts, context=1200)
    online, offline = (
        align_corpus(in_memory(texts), student, reader)
        for reader in (teacher, StoredReader([stored]))
    )
    assert len(online.rows) > 50
    assert without(offline.rows, TEACHER_COLUMNS) == without(online.rows, TEACHER_COLUMNS)
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


def assert_equals_slow(texts: list[str], rows: list[Row], student: Reader, *stores: Store) -> None:
    """Check the rows of one or more stores, whose tokens follow each other."""
    for row in rows:
        assert row["unmapped_text_tokens"] == 0
        at, all_ranges = 0, align_segment(row).tolist()
        for store, ranges in zip(stores, all_ranges, strict=True):
            expected = slow_stored_row(texts[row["document"]], row, student, store)
            losses = row["teacher_losses"][at : at + expected["teacher_tokens"]]
            assert np.isnan(losses[0])
            assert losses[1:] == expected["losses"]
            assert ranges == expected["ranges"]
            assert row["student_ids"] == expected["student_ids"]
            assert len(losses) <= store.manifest["context"]
            at += len(losses)
        assert row["teacher_tokens"] == len(row["teacher_losses"]) == at


@pytest.mark.parametrize("pair", [("metaspace", "nfc_digits"), ("unigram", "byte_level")])
def test_long_stored_documents_are_cut_by_the_student(
    tokenizers_by_family: Tokenizers,
    fuzz_texts: Callable[..., list[str]],
    store_of: Callable[..., Store],
    pair: tuple[str, str],
) -> None:
    texts = [*PAGES, *(text for text in fuzz_texts(40, seed=3, pieces=90) if text.strip())]
    student = student_of(tokenizers_by_family, pair[0], 24)
    store = store_of(pair[1], texts)
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
    assert any(row["end"] % 40 for row in rows), "no cut is inside of a token"
    assert_equals_slow([text], rows, student, store)


# Several stores


@pytest.mark.parametrize(
    "contexts", [{"nfc_digits": 20}, {"nfc_digits": 30, "byte_level": 31, "prepend": 32}]
)
def test_rows_hold_the_teachers_of_all_stores(
    tokenizers_by_family: Tokenizers, store_of: Callable[..., Store], contexts: dict[str, int]
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 500)
    stores = [
        store_of(family, seed=seed, context=context)
        for seed, (family, context) in enumerate(contexts.items())
    ]
    reader = StoredReader(stores)
    assert reader.limits() == list(contexts.values())
    assert_equals_slow(PAGES, rows_of(PAGES, student, reader), student, *stores)


def test_one_teacher_of_several_stores_has_the_narrowest_context(
    store_of: Callable[..., Store],
) -> None:
    stores = [store_of("nfc_digits", context=context) for context in (30, 20)]
    assert StoredReader(stores, first=True).limits() == [20]


def test_documents_that_one_store_lacks_are_skipped(
    tokenizers_by_family: Tokenizers, store_of: Callable[..., Store]
) -> None:
    student = student_of(tokenizers_by_family, "metaspace")
    parts = {"A": PAGES[:3], "B": [PAGES[3], *PAGES[2::-2]]}
    stores = [store_of("byte_level", texts, teacher=teacher) for teacher, texts in parts.items()]
    segments = align_corpus(in_memory(PAGES[:4]), student, StoredReader(stores))
    assert set(segments.rows["document"]) == {0, 2}
    assert segments.skipped == [(1, MISSING), (3, MISSING)]


def test_first_store_of_a_document_is_its_teacher(
    tokenizers_by_family: Tokenizers, store_of: Callable[..., Store]
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    parts = {"nfc_digits": PAGES[:2], "byte_level": PAGES[1:3]}
    stores = [store_of(family, texts, context=20) for family, texts in parts.items()]
    segments = align_corpus(in_memory(PAGES), student, StoredReader(stores, first=True))
    assert segments.skipped == [(3, MISSING), (4, MISSING)]
    for document, store in enumerate((0, 0, 1)):
        rows = [row for row in segments.rows if row["document"] == document]
        alone = rows_of([PAGES[document]], student, StoredReader([stores[store]]))
        # NaN is not equal to itself.
        assert str(rows) == str([row | {"document": document} for row in alone])


def test_document_in_two_stores_of_a_teacher_is_the_first_stores(
    store_of: Callable[..., Store],
) -> None:
    stores = [store_of("byte_level", seed=seed) for seed in (0, 1)]
    for order in (stores, stores[::-1]):
        (tokens,), _ = StoredReader(order).read(PAGES)
        (alone,), _ = StoredReader(order[:1]).read(PAGES)
        assert np.array_equal(tokens.values, alone.values)


@pytest.mark.parametrize("first", [True, False])
def test_missing_document_is_plain_text_where_asked(
    tokenizers_by_family: Tokenizers, store_of: Callable[..., Store], first: bool
) -> None:
    student = student_of(tokenizers_by_family, "metaspace", 24)
    stores = []
    for teacher, count in (("A", 1), ("B", 2)):
        stores.append(store_of("byte_level", PAGES[:count], context=20, teacher=teacher))
    reader = StoredReader(stores, first=first, plain=True)
    found, plain = rows_of(PAGES, student, reader), rows_of(PAGES, student, None)
    for document in range(len(PAGES)):
        rows, alone = ([r for r in x if r["document"] == document] for x in (found, plain))
        is_guided = document < (2 if first else 1)
        assert {row["unmapped_text_tokens"] > 0 for row in rows} == {not is_guided}
        if not is_guided:
            for name in ("start", "end", "student_ids", "text_tokens", "unmapped_text_tokens"):
                assert [row[name] for row in rows] == [row[name] for row in alone]
            assert all(row["teacher_counts"] == [1] * (1 if first else 2) for row in rows)


def test_document_that_a_teacher_could_not_score_has_no_teacher(tmp_path: Path) -> None:
    """It is stored without losses, as for a server that refused it."""
    stores = []
    for tokens in (0, 1):
        spans = np.array([[0, 1]])[:tokens]
        document = StoredDocument(1, spans, np.ones(tokens, np.float32))
        stores.append(write_store(tmp_path / str(tokens), [("a", document)]))
    (tokens,), lacking = StoredReader(stores, first=True).read(["a"])
    assert (len(tokens.values), lacking) == (1, {})
    assert StoredReader(stores[:1], plain=True).read(["a"])[1] == {0: None}
    assert StoredReader(stores[:1]).read(["a"])[1] == {}


# Other processes, and the cache


def test_reader_is_identified_by_what_it_reads(store_of: Callable[..., Store]) -> None:
    same, copy, other = (store_of("trimmed", seed=seed) for seed in (0, 0, 1))
    assert StoredReader([same]).fingerprint() == StoredReader([copy]).fingerprint()
    stores = ([same], [other], [same, other], [other, same])
    options: list[dict[str, bool]] = [
        {},
        {"first": True},
        {"plain": True},
        {"first": True, "plain": True},
    ]
    readers = [StoredReader(chosen, **given) for chosen in stores for given in options]
    assert len({reader.fingerprint() for reader in readers}) == len(readers)
    # Caches of earlier versions, for which each of two stores was a teacher, had only this.
    assert (
        StoredReader([same, other]).fingerprint() != f"{same.fingerprint()}|{other.fingerprint()}"
    )


def test_reader_is_small_for_another_process(store_of: Callable[..., Store]) -> None:
    store = store_of("byte_level")
    reader = StoredReader([store, store])
    assert not reader.read([LONG])[1]  # the file is now memory-mapped
    sent = pickle.dumps(reader)
    assert len(sent) < 1000
    assert len(sent) < sum(path.stat().st_size for path in store.directory.iterdir()) / 10
    again = pickle.loads(sent)
    assert again.fingerprint() == reader.fingerprint()
    for ours, theirs in zip(again.read([LONG])[0], reader.read([LONG])[0], strict=True):
        assert np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.spans, theirs.spans)


@pytest.mark.processes
def test_alignment_is_the_same_by_two_processes(
    tokenizers_by_family: Tokenizers, store_of: Callable[..., Store], tmp_path: Path
) -> None:
    texts = [*PAGES, *(f"Page {number} of it." for number in range(40)), "unknown"]
    corpus = load_corpus(str(write_corpus(tmp_path / "pages.jsonl", texts)))
    student = student_of(tokenizers_by_family, "metaspace", 24)
    store = store_of("trimmed", texts[:-1])
    alone = align_corpus(corpus, student, StoredReader([store]))
    copied = Store(store.directory)  # and without the cache of the first
    copied.manifest["teacher"] = "another fingerprint"
    shared = align_corpus(corpus, student, StoredReader([copied]), num_proc=2)
    assert shared.rows.cache_files != alone.rows.cache_files
    assert str(list(shared.rows)) == str(list(alone.rows))  # NaN is not equal to itself
    assert shared.skipped == alone.skipped == [(len(corpus) - 1, MISSING)]
