"""Documents to aligned segments, against a slow reference; what is skipped; the cache."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import datasets
import numpy as np
import pytest
from filelock import FileLock
from tokenizer_stubs import tokens_between
from tokenizers import Tokenizer, models
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import vocagnolm.data
import vocagnolm.readers
from vocagnolm.alignment import align_segment, segment_shares
from vocagnolm.corpus import load_corpus
from vocagnolm.cutting import EMPTY, cut_text
from vocagnolm.data import Segments, align_corpus
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders, student_reader, teacher_reader
from vocagnolm.spans import encode, encode_texts
from vocagnolm.tokenizer import start_id

PAIRS = [
    ("metaspace", "nfc_digits"),
    ("metaspace", "byte_level"),
    ("prepend", "trimmed"),
    ("byte_level", "metaspace"),
    ("nfc_digits", "prepend"),
    ("trimmed", "nfc_digits"),
    ("metaspace", "unigram"),
    ("unigram", "byte_level"),
]
Row = dict[str, Any]
Tokenizers = dict[str, PreTrainedTokenizerFast]
# Texts with no place to cut or with many, and with characters of several tokens.
LONG_TEXTS = [
    *("x" * 300, "0123456789" * 30, "😀" * 70, "👩\u200d👩\u200d👧\u200d👦" * 15, "数学" * 90),
    *("word " * 60, "a\n\n" * 70, "e\u0301" * 80, "<s></s><|endoftext|>" * 8),
]
PAGES = [
    "A page.\n\nIts second paragraph, with $x^2 = 4$ and 1,234 apples.\nEnd. " * 3,
    "Short",
    " Spaces  before and after. ",
]


def in_memory(texts: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts})


Readers = Callable[..., tuple[Reader, Reader]]


@pytest.fixture
def readers(tokenizers_by_family: Tokenizers) -> Readers:
    """`readers(pair, limits)`: the student's and the teacher's."""

    def make(
        pair: tuple[str, str] = PAIRS[0], limits: tuple[int, int] = (24, 32)
    ) -> tuple[Reader, Reader]:
        student, teacher = (tokenizers_by_family[family] for family in pair)
        return student_reader(student, limits[0]), teacher_reader(teacher, limits[1])

    return make


def by_document(segments: Segments) -> dict[int, list[Row]]:
    documents: dict[int, list[Row]] = defaultdict(list)
    for row in segments.rows:
        documents[row["document"]].append(row)
    return documents


def slow_row(
    text: str, document: int, start: int, end: int, student: Reader, teacher: Reader
) -> Row:
    """One row from the whole text's tokens; ranges by looking at every pair of them."""
    ours, theirs = (tokens_between(r.tokenizer, text, start, end) for r in (student, teacher))
    ids, ranges, shares = [student.start], [(-1, -1)], [[1.0] * 3]
    own, other = ours.spans.tolist(), theirs.spans.tolist()
    sharing = Counter(c for a, b in own for c in range(a, b))
    for token, (a, b) in zip(ours.ids, own, strict=True):
        touching = [i for i, (c, d) in enumerate(other) if max(a, c) < min(b, d)]
        ids.append(int(token))
        # + 1: the teacher's start token is the first of its row.
        ranges.append((touching[0] + 1, touching[-1] + 2) if touching else (-1, -1))
        shares.append([1.0] * 3)
        parts = {0: touching[:1], 1: touching[1:-1], 2: touching[1:][-1:]}
        for column, tokens in parts.items():
            if tokens:
                c, d = other[tokens[0]][0], other[tokens[-1]][1]
                covered = sum(1 / sharing[x] for x in range(max(a, c), min(b, d)))
                shares[-1][column] = float(np.float32(covered / (d - c)))
    if end == len(text):
        shares.append([1.0] * 3)
        assert student.end is not None
        ids.append(student.end)
        ranges.append((-1, -1))
    teacher_ids = [teacher.start, *map(int, theirs.ids)]
    return {
        "document": document,
        "start": start,
        "end": end,
        "student_ids": ids,
        "teacher_ids": teacher_ids,
        "teacher_losses": [],
        "ranges": [list(map(list, ranges))],
        "shares": [shares],
        "student_tokens": len(ids),
        "student_crc32": zlib.crc32(np.array(ids, np.int32).tobytes()),
        "teacher_tokens": len(teacher_ids),
        "teacher_counts": [len(teacher_ids)],
        "unmapped_text_tokens": ranges[1 : 1 + len(ours.ids)].count((-1, -1)),
        "text_tokens": len(ours.ids),
        # What a document has in the columns of conversations.
        **{"student_labelled": [], "teacher_labelled": []},
        **{"left_out_messages": 0, "trimmed_characters": 0},
        "skipped": None,
    }


def mapped(row: Row) -> Row:
    """A row with ranges and shares in place of its spans."""
    ranges = align_segment(row)
    spans = ("student_codes", "student_exceptions", "teacher_codes", "teacher_exceptions")
    return {name: row[name] for name in row if name not in spans} | {
        "ranges": ranges.tolist(),
        "shares": segment_shares(row, ranges).tolist(),
    }


def assert_tiles(text: str, rows: list[Row]) -> None:
    """Check that the segments follow each other and make up the whole document."""
    assert rows[0]["start"] == 0
    assert rows[-1]["end"] == len(text)
    assert all(a["end"] == b["start"] for a, b in pairwise(rows))
    assert "".join(text[row["start"] : row["end"]] for row in rows) == text
    assert all(row["start"] < row["end"] for row in rows)


# Rows


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_align_corpus_equals_the_slow_reference(
    readers: Readers, fuzz_texts: Callable[..., list[str]], pair: tuple[str, str]
) -> None:
    texts = [*fuzz_texts(40, seed=7, pieces=60), *fuzz_texts(40, seed=8), *PAGES, *LONG_TEXTS]
    student, teacher = readers(pair)
    segments = align_corpus(in_memory(texts), student, teacher)
    documents = by_document(segments)
    skipped = dict(segments.skipped)
    assert sorted([*documents, *skipped]) == list(range(len(texts)))
    assert len(segments.rows) > len(documents) > 60
    assert all(len(rows) > 1 for rows in [*documents.values()][-len(LONG_TEXTS) :])
    for document, rows in documents.items():
        text = texts[document]
        assert_tiles(text, rows)
        for row in rows:
            expected = slow_row(text, document, row["start"], row["end"], student, teacher)
            assert mapped(row) == expected
            assert row["student_tokens"] <= student.limit
            assert row["teacher_tokens"] <= teacher.limit
    for document, reason in skipped.items():
        blank = not texts[document].strip()
        assert reason == ("empty" if blank else EMPTY)
        assert blank or "unigram" in pair  # the only one that drops white space
    keys = [(row["document"], row["start"]) for row in segments.rows]
    assert keys == sorted(keys)


def test_tokens_are_mapped_by_number_without_spans(readers: Readers) -> None:
    student, teachers = readers(limits=(99, 99))
    student, one, other = (Reader(r.tokenizer, 1, 2, 99) for r in (teachers, student, teachers))
    text = "has 12,345"
    both = TeacherReaders((one, other), by_position=True)
    (row,) = align_corpus(in_memory([text]), student, both).rows
    count, fewer, same = (len(encode(r.tokenizer, text).ids) for r in (student, one, other))
    assert fewer < same == count
    assert (row["teacher_codes"], row["teacher_counts"]) == ([], [1 + fewer, 1 + same])
    for found, tokens in zip(align_segment(row).tolist(), (fewer, same), strict=True):
        pairs = [[n, n + 1] if 1 <= n <= tokens else [-1, -1] for n in range(count + 2)]
        assert found == pairs
    assert row["unmapped_text_tokens"] == count - fewer


@pytest.mark.parametrize(("largest", "kind"), [(65_535, "uint16"), (65_536, "int32")])
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_ids_take_two_bytes_where_they_fit(
    readers: Readers, largest: int, kind: str, role: str
) -> None:
    words = Tokenizer(WordLevel({"a": 1, "b": largest}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)  # type: ignore[no-untyped-call]
    wide = Reader(tokenizer, 1, None, 9)
    small = readers()[1]
    student, teachers = (wide, (small,)) if role == "student" else (small, (small, wide))
    rows = align_corpus(in_memory(["a b"]), student, TeacherReaders(teachers)).rows
    kinds = {who: rows.features[f"{who}_ids"].feature.dtype for who in ("student", "teacher")}
    assert kinds == {"student": "uint16", "teacher": "uint16", role: kind}
    assert rows[0][f"{role}_ids"][-3:] == [1, 1, largest]
    assert Blocks(rows, 99, [99] * len(teachers))[0][f"{role}_ids"][0][-1] == largest  # type: ignore[literal-required]


@pytest.mark.parametrize(("ours_less", "theirs_less"), [(0, 0), (1, 0), (0, 1)])
def test_document_is_cut_from_one_token_too_many(
    readers: Readers, ours_less: int, theirs_less: int
) -> None:
    student, teacher = readers()
    ours, theirs = (len(encode(reader.tokenizer, PAGES[0]).ids) for reader in (student, teacher))
    special = 24 - student.text_limit
    limits = (ours + special - ours_less, theirs + 1 - theirs_less)
    found = align_corpus(in_memory(PAGES[:1]), *readers(limits=limits))
    assert (len(found.rows) > 1) == bool(ours_less or theirs_less)


def test_segments_are_filled_well_and_cut_at_white_space(readers: Readers) -> None:
    text = ("Anna has 12 apples and buys 30 more. " * 40 + "\n\n") * 135
    assert len(text) > 200_000
    student, teacher = readers(limits=(512, 1024))
    rows = list(align_corpus(in_memory([text]), student, teacher).rows)
    assert_tiles(text, rows)
    for row in rows[1:]:
        assert any(map(str.isspace, text[row["start"] - 1 : row["start"] + 1]))
    fullest = max(max(row["student_tokens"] / 512, row["teacher_tokens"] / 1024) for row in rows)
    assert 0.8 < fullest <= 1.0


# What cannot be used


def test_skipped_documents_are_listed(readers: Readers, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": text}) for text in ("aa", " ", "ab \U0001d538", 5, "b")]
    path.write_text("\n".join([*rows, "{oops"]))
    segments = align_corpus(load_corpus(str(path)), *readers(limits=(64, 3)))
    assert set(segments.rows["document"]) == {0, 4}
    reasons = dict(segments.skipped)
    assert [*reasons] == [1, 2, 3, 5]
    for number, words in ((1, "empty"), (2, "character 3 "), (3, "int"), (5, "a.jsonl:6: ")):
        assert words in reasons[number]


def test_align_corpus_skips_only_the_culprit(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def picky(tokenizer: Any, texts: list[str]) -> Any:
        if any("odd" in text for text in texts):
            raise ValueError("offsets are not in order")
        return encode_texts(tokenizer, texts)

    monkeypatch.setattr(vocagnolm.readers, "encode_texts", picky)
    segments = align_corpus(in_memory(["a", "odd", "b"]), *readers())
    assert segments.skipped == [(1, "offsets are not in order")]
    assert segments.rows["document"][:] == [0, 2]


@pytest.mark.parametrize("texts", [[], ["", " "]])
def test_unusable_documents_give_no_rows(readers: Readers, texts: list[str]) -> None:
    segments = align_corpus(in_memory(texts), *readers())
    assert (len(segments.rows), len(segments.skipped)) == (0, len(texts))
    assert segments.total("student_tokens") == 0


def test_digest_tells_corpora_apart(readers: Readers) -> None:
    pair = readers()
    corpora = [PAGES, PAGES[::-1], PAGES[:-1], ["the cat and the dog"], ["the dog and the cat"]]
    segments = [align_corpus(in_memory(texts), *pair) for texts in corpora]
    assert segments[-2].total("student_tokens") == segments[-1].total("student_tokens")
    digests = [part.digest() for part in segments]
    assert len(set(digests)) == len(corpora)
    assert align_corpus(in_memory(PAGES), *pair).digest() == digests[0]


def test_weights_of_a_corpus_are_those_of_its_segments(readers: Readers) -> None:
    pair = readers()
    plain = align_corpus(in_memory(PAGES), *pair)
    assert "student_weights" not in plain.rows.column_names
    # Without weights, the digest is what it was before there were any.
    columns = {"document": np.int64, "student_tokens": np.int32, "teacher_tokens": np.int32}
    parts = [np.array(plain.rows[name][:], dtype) for name, dtype in columns.items()]
    parts.append(np.array(plain.rows["student_crc32"][:], np.uint32))
    expected = hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]
    digests = {plain.digest()}
    assert digests == {expected}
    for weights in ([1.0] * len(PAGES), [0.5, None, *range(len(PAGES) - 2)]):
        corpus = in_memory(PAGES).add_column("weight", weights)
        found = align_corpus(corpus, *pair)
        for row in found.rows:
            weight = weights[row["document"]]
            assert row.pop("student_weights") == [1.0 if weight is None else weight]
        same = found.rows.remove_columns("student_weights")
        assert same.to_list() == plain.rows.to_list()
        digests.add(found.digest())
    assert len(digests) == 3
    assert "smallest 0, largest" in found.describe_weights()
    # Beside such a corpus, one without weights has 1.
    joined = datasets.concatenate_datasets([plain.with_weights(), found.rows])
    blocks = Blocks(joined, 64, 64)
    values = {len(each) for block in blocks for each in block["student_weights"]}
    assert values == {0, 1}


# Processes and cache


@pytest.fixture
def pages(tmp_path: Path) -> datasets.Dataset:
    path = tmp_path / "pages.jsonl"
    texts = [*PAGES, None, "", *(f"Page {number} of it." for number in range(20))]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return load_corpus(str(path))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts were encoded, call by call."""
    counts: list[int] = []
    original = vocagnolm.data._Aligner._texts

    def counting(self: Any, texts: dict[int, str], skipped: Any) -> Any:
        counts.append(len(texts))
        return original(self, texts, skipped)

    monkeypatch.setattr(vocagnolm.data._Aligner, "_texts", counting)
    return counts


@pytest.mark.parametrize("of_parquet", [False, True])
def test_next_start_reads_the_cache_when_nothing_changed(
    readers: Readers, tmp_path: Path, encoded: list[int], of_parquet: bool
) -> None:
    for number in range(2):
        texts = in_memory([*PAGES, f"Only in file {number}.", ""])
        if of_parquet:
            texts.to_parquet(tmp_path / f"{number}.parquet")
        else:
            texts.to_json(tmp_path / f"{number}.jsonl")
    first = align_corpus(load_corpus(str(tmp_path)), *readers())
    assert encoded
    encoded.clear()
    # Another file changes what is said about the directory, but no document.
    (tmp_path / "notes.md").touch()
    again = align_corpus(load_corpus(str(tmp_path)), *readers())
    assert not encoded
    assert again.rows.cache_files == first.rows.cache_files != []
    assert (list(again.rows), again.skipped) == (list(first.rows), first.skipped)


def test_cache_is_missed_after_a_document_a_reader_or_the_format_changed(
    readers: Readers, pages: datasets.Dataset, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = readers()
    align_corpus(pages, student, teacher)
    changed: list[Any] = [
        (student, None),
        (student, student),
        (student, TeacherReaders((teacher,), by_position=True)),
        (student, TeacherReaders((teacher, student))),
        readers(PAIRS[0], (23, 32)),
        readers(PAIRS[0], (24, 31)),
        readers(("metaspace", "byte_level")),
        readers(("prepend", "nfc_digits")),
    ]
    for pair in changed:
        encoded.clear()
        align_corpus(pages, *pair)
        assert encoded
    for other in (pages.select(range(1, len(pages))), pages.select(range(len(pages))[::-1])):
        encoded.clear()
        align_corpus(other, student, teacher)
        assert encoded
    encoded.clear()
    monkeypatch.setattr(vocagnolm.data, "_FORMAT", -1)
    align_corpus(pages, student, teacher)
    assert encoded


@pytest.mark.processes
@pytest.mark.parametrize("num_proc", [None, 2])
@pytest.mark.parametrize("step", [1, -1])
def test_parts_make_the_whole(
    readers: Readers,
    pages: datasets.Dataset,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    num_proc: int | None,
) -> None:
    pair = readers()
    pages = pages.select(range(len(pages))[::step])  # in another order: indices over the same table
    expected = align_corpus(pages, *pair)
    monkeypatch.setattr(vocagnolm.data, "_PART", 8)  # the last part has one document
    assert len(pages) % 8 == 1
    found = align_corpus(pages, *pair, num_proc=num_proc)
    assert len(found.rows.cache_files) > len(expected.rows.cache_files) == 1
    assert (list(found.rows), found.skipped) == (list(expected.rows), expected.skipped)
    assert found.digest() == expected.digest()


def test_finished_parts_survive_a_kill(
    readers: Readers, pages: datasets.Dataset, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = readers()
    monkeypatch.setattr(vocagnolm.data, "_PART", 9)

    def killed(tokenizer: Any, texts: list[str]) -> Any:
        if "Page 19 of it." in texts:  # in the last part
            raise KeyboardInterrupt
        return encode_texts(tokenizer, texts)

    with monkeypatch.context() as patch:
        patch.setattr(vocagnolm.readers, "encode_texts", killed)
        with pytest.raises(KeyboardInterrupt):
            align_corpus(pages, *pair)
    encoded.clear()
    rows = align_corpus(pages, *pair).rows
    assert encoded == [len(pages) % 9]
    assert len(set(rows["document"])) == len(pages) - 2


def test_part_of_another_process_is_waited_for(
    readers: Readers, pages: datasets.Dataset, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = readers()
    monkeypatch.setattr(vocagnolm.data, "_PART", 9)
    expected = align_corpus(pages, *pair).rows
    first, *others = [Path(file["filename"]) for file in expected.cache_files]
    made = first.read_bytes()
    for file in (first, *others):
        file.unlink()

    def work_elsewhere() -> None:
        with FileLock(f"{first}.lock"):
            begun.set()
            while not all(file.exists() for file in others):
                time.sleep(0.01)
            first.write_bytes(made)

    begun, elsewhere = Event(), Thread(target=work_elsewhere)
    encoded.clear()
    elsewhere.start()
    begun.wait()
    rows = align_corpus(pages, *pair).rows
    elsewhere.join()
    assert list(rows) == list(expected)
    assert sum(encoded) == sum(bool(x) for x in pages["text"][9:])


# Segments


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.999])
def test_split_holds_out_the_exact_share(readers: Readers, fraction: float) -> None:
    texts = [f"Document {number}. " * (1 + number % 9) for number in range(100)]
    segments = align_corpus(in_memory(texts), *readers())
    rest, held = (part.rows["document"][:] for part in segments.split(fraction, seed=3))
    assert len(set(held)) == {0.999: 100}.get(fraction, round(fraction * 100))
    assert not set(rest) & set(held)
    assert sorted(rest + held) == segments.rows["document"][:]
    assert sorted(rest) == rest  # the order is kept
    again, other = (segments.split(fraction, seed)[1].rows["document"][:] for seed in (3, 4))
    assert again == held
    assert again != other or fraction == 0.999


def test_nothing_is_mapped_without_a_teacher(readers: Readers) -> None:
    student, teacher = readers(limits=(24, 10_000))
    guided = align_corpus(in_memory(PAGES), student, teacher)
    plain = align_corpus(in_memory(PAGES), student, None)
    for name in ("student_ids", "end"):
        assert plain.rows[name][:] == guided.rows[name][:]
    absent = {*guided.rows.column_names} - {*plain.rows.column_names}
    assert all(name.startswith("teacher_") for name in absent)
    assert (plain.total("teacher_tokens"), plain.mapped_text_fraction) == (0, 0.0)
    assert guided.mapped_text_fraction == 1.0


# Places to cut a text


def test_no_cut_goes_through_a_token() -> None:
    ours = np.array([[at, at + 1] for at in range(12)])
    # After six of twelve characters a token ends, but the next one begins before that.
    theirs = np.insert(ours, 6, [5, 7], axis=0)
    assert cut_text("x" * 12, [ours, theirs], [8, 100]) == [0, 5, 12]


def test_characters_of_many_tokens_are_cut_apart() -> None:
    # Equal parts would be of half a character.
    assert cut_text("😀😀", [np.array([[0, 1]] * 4 + [[1, 2]] * 4)], [4]) == [0, 1, 2]
    assert "character 0 " in str(cut_text("😀😀", [np.array([[0, 1]] * 5 + [[1, 2]])], [4]))


def test_text_without_a_token_of_a_model_is_not_cut() -> None:
    spans = [np.array([[0, 1], [1, 2]]), np.empty((0, 2), np.int64)]
    assert cut_text("ab", spans, [4, 4]) == EMPTY


# Readers


def test_start_id_is_that_of_the_first_token_there_is(tokenizers_by_family: Tokenizers) -> None:
    backend = tokenizers_by_family["nfc_digits"].backend_tokenizer  # has <|endoftext|> as well
    named = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|im_start|>")
    tokenizers = (
        (tokenizers_by_family["metaspace"], "<s>"),
        (named, "<|im_start|>"),
        # The separator, and not <|im_end|>, which is the end of a turn.
        (tokenizers_by_family["nfc_digits"], "<|endoftext|>"),
        (tokenizers_by_family["unigram"], tokenizers_by_family["unigram"].eos_token),
    )
    for tokenizer, expected in tokenizers:
        assert tokenizer.convert_ids_to_tokens(start_id(tokenizer, "student")) == expected
    with pytest.raises(ValueError, match=r"teacher tokenizer .* no BOS token"):
        start_id(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), "teacher")


def test_student_without_end_token_is_rejected(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers_by_family["metaspace"].backend_tokenizer, bos_token="<s>"
    )
    with pytest.raises(ValueError, match="no EOS token"):
        student_reader(tokenizer, 32)


def test_reader_fingerprint_stays_when_the_tokenizer_was_used(readers: Readers) -> None:
    for reader in readers():
        before = reader.fingerprint()
        encode(reader.tokenizer, "text </s>")
        assert reader.fingerprint() == before
