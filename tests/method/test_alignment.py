"""`align_spans` against two brute-force oracles, on every pair of tokenizer families."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_data import real_data
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import (
    align_positions,
    align_spans,
    covered_shares,
    narrow_spans,
    widen_spans,
)
from vocagnolm.conventions import Spans
from vocagnolm.spans import Encoding, encode_batch
from vocagnolm.tokenizer import load_tokenizer

FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")
CORPORA = ("gsm8k_train", "math_train", "planetmath", "stacks_project")
TEACHERS = ("mistral-7b-v0.1", "deepseek-math-7b", "qwen2.5")
# VOCAGNOLM_FUZZ=20000 tests more.
FUZZ_COUNT, BATCH = int(os.environ.get("VOCAGNOLM_FUZZ", "4000")), 500


# The oracles. They look at every pair of a student and a teacher token, [..., N, M] booleans.


def _outermost(hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last true index along the last axis."""
    return hit.argmax(-1), hit.shape[-1] - 1 - hit[..., ::-1].argmax(-1)


def paper_oracle(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """Algorithm 1, with offsets.

    A range goes from the earliest teacher token whose end exceeds the student token's start to the
    latest whose start is below its end.
    """
    ends_after = teacher[..., None, :, 1] > student[..., :, None, 0]
    starts_before = teacher[..., None, :, 0] < student[..., :, None, 1]
    low, _ = _outermost(ends_after)
    _, high = _outermost(starts_before)
    mapped = ends_after.any(-1) & starts_before.any(-1) & (low <= high)
    return np.where(mapped[..., None], np.stack((low, high + 1), -1), -1)


def overlap_oracle(student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """From the first to the last teacher token that shares a character with the student token."""
    start = np.maximum(student[..., :, None, 0], teacher[..., None, :, 0])
    end = np.minimum(student[..., :, None, 1], teacher[..., None, :, 1])
    shares = start < end
    low, high = _outermost(shares)
    return np.where(shares.any(-1)[..., None], np.stack((low, high + 1), -1), -1)


def pad(spans: list[Spans]) -> np.ndarray:
    """[B, max N, 2]; the padding touches nothing."""
    padded = np.full((len(spans), max(1, *map(len, spans)), 2), (2**40, -(2**40)))
    for row, span in zip(padded, spans, strict=True):
        row[: len(span)] = span
    return padded


@pytest.fixture(scope="module")
def fuzz_encodings(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast], fuzz_texts: Callable[..., list[str]]
) -> dict[str, list[Encoding]]:
    """Encodings of `FUZZ_COUNT` different texts, by length, in all families."""
    texts = list(dict.fromkeys(fuzz_texts(FUZZ_COUNT * 5 // 4, seed=1)))[:FUZZ_COUNT]
    assert len(texts) == FUZZ_COUNT
    texts.sort(key=len)
    return {
        family: encode_batch(tokenizer, texts) for family, tokenizer in tokenizers_by_family.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("student_family", FAMILIES)
def test_align_spans_equals_brute_force(
    fuzz_encodings: dict[str, list[Encoding]], student_family: str
) -> None:
    students = [encoding.spans for encoding in fuzz_encodings[student_family]]
    for teacher_family in FAMILIES:
        teachers = [encoding.spans for encoding in fuzz_encodings[teacher_family]]
        for first in range(0, FUZZ_COUNT, BATCH):
            student = students[first : first + BATCH]
            teacher = teachers[first : first + BATCH]
            ranges = [align_spans(s, t) for s, t in zip(student, teacher, strict=True)]
            padded_student, padded_teacher = pad(student), pad(teacher)
            real = padded_student[..., 0] < 2**40
            found = np.concatenate(ranges)
            np.testing.assert_array_equal(
                found, paper_oracle(padded_student, padded_teacher)[real], teacher_family
            )
            np.testing.assert_array_equal(
                found, overlap_oracle(padded_student, padded_teacher)[real], teacher_family
            )
            has_teacher = np.repeat([len(t) > 0 for t in teacher], [len(s) for s in student])
            np.testing.assert_array_equal(found[:, 0] >= 0, has_teacher, teacher_family)


@st.composite
def sorted_spans(draw: st.DrawFn, smallest: int) -> Spans:
    """Spans with gaps, overlaps and shared characters, at least `smallest` characters long."""
    starts = sorted(draw(st.lists(st.integers(0, 30), max_size=12)))
    lengths = draw(st.lists(st.integers(smallest, 6), min_size=12, max_size=12))
    ends = [start + length for start, length in zip(starts, lengths, strict=False)]
    return np.array(
        list(zip(starts, np.maximum.accumulate(ends or [0]), strict=False)), dtype=np.int64
    ).reshape(-1, 2)


@given(sorted_spans(smallest=0), sorted_spans(smallest=0))
def test_align_spans_follows_the_paper(student: Spans, teacher: Spans) -> None:
    expected = paper_oracle(student, teacher) if len(teacher) else np.full_like(student, -1)
    np.testing.assert_array_equal(align_spans(student, teacher), expected)


@given(sorted_spans(smallest=1), sorted_spans(smallest=1))
def test_align_spans_finds_every_shared_character(student: Spans, teacher: Spans) -> None:
    expected = overlap_oracle(student, teacher) if len(teacher) else np.full_like(student, -1)
    np.testing.assert_array_equal(align_spans(student, teacher), expected)


@pytest.mark.parametrize(
    ("spans", "token"),
    [([[0, 2], [2, 3], [0, 0]], 2), ([[0, 4], [1, 3]], 1), ([[2, 3], [1, 3]], 1), ([[2, 1]], 0)],
)
def test_spans_out_of_order_are_rejected(spans: list[list[int]], token: int) -> None:
    good = np.array([[0, 1]])
    wrong = np.array(spans)
    with pytest.raises(ValueError, match=f"student spans .* at token {token}: encode without"):
        align_spans(wrong, good)
    with pytest.raises(ValueError, match=f"teacher spans .* at token {token}: encode without"):
        align_spans(good, wrong)


@pytest.mark.slow
def test_align_spans_covers_every_character() -> None:
    texts = []
    for corpus in CORPORA:
        with real_data(f"data/corpora/{corpus}.jsonl").open(encoding="utf-8") as lines:
            texts += [json.loads(line)["text"][:3000] for line in islice(lines, 40)]
    student, *others = (
        encode_batch(load_tokenizer(str(real_data(f"tokenizers/{name}")), "teacher"), texts)
        for name in ("tinyllama", *TEACHERS)
    )
    for teacher in others:
        students = teachers = single = 0
        for s, t in zip(student, teacher, strict=True):
            ranges = align_spans(s.spans, t.spans)
            assert (ranges >= 0).all()
            np.testing.assert_array_equal(ranges, paper_oracle(s.spans, t.spans))
            np.testing.assert_array_equal(ranges, overlap_oracle(s.spans, t.spans))
            # IoS of 100 %: each character of a student token is in a token of its range.
            for (start, end), (low, stop) in zip(s.spans, ranges, strict=True):
                characters = {c for left, right in t.spans[low:stop] for c in range(left, right)}
                assert characters.issuperset(range(start, end))
            students, teachers = students + len(ranges), teachers + len(t.spans)
            single += int((ranges[:, 1] - ranges[:, 0] == 1).sum())
        assert students > 50_000
        assert 0.7 < teachers / students < 1.2
        assert single / students > 0.9


@st.composite
def spans_with_shared_characters(draw: st.DrawFn, length: int) -> Spans:
    """Tokens of a text without gaps; some share the last character before them, or go beyond it."""
    spans, end = [], 0
    while end < length:
        start, end = end, min(length, end + draw(st.integers(1, 3)))
        spans.append((start, end))
        spans += [(end - 1, end)] * draw(st.sampled_from([0, 0, 0, 1, 3]))
        if end < length and draw(st.integers(0, 9)) == 0:
            spans.append((end - 1, end + 1))
            end += 1
    return np.array(spans)


def slow_share(student: Spans, token: int, first: int, last: int) -> Fraction:
    """Share of [first, last) that a token has; tokens split a common character evenly."""
    begin, end = student[token].tolist()
    shared = range(max(first, begin), min(last, end))
    counts = (sum(a <= c < b for a, b in student.tolist()) for c in shared)
    return Fraction(sum(Fraction(1, count) for count in counts), last - first)


@given(st.data(), st.integers(1, 14))
def test_shares_equal_a_count_of_characters(data: st.DataObject, length: int) -> None:
    student, teacher = (data.draw(spans_with_shared_characters(length)) for _ in range(2))
    ranges = align_spans(student, teacher)
    found = covered_shares(student, teacher, ranges)
    for token, (first, last) in enumerate(ranges.tolist()):
        parts = [(first, first)] + [(last - 1, last - 1)] * (last - first > 1)
        if last - first > 2:
            parts.insert(1, (first + 1, last - 2))
        expected = [slow_share(student, token, teacher[a, 0], teacher[b, 1]) for a, b in parts]
        columns = {1: [0], 2: [0, 2], 3: [0, 1, 2]}[len(parts)]
        assert found[token, columns].tolist() == pytest.approx(list(map(float, expected)))
        assert (np.delete(found[token], columns) == 1).all()


def test_shares_keep_the_nats_of_a_text() -> None:
    """An emoji of four student bytes and two teacher tokens, and words cut differently."""
    student = np.array([[0, 2], [2, 3], [2, 3], [2, 3], [2, 3], [3, 6], [6, 7]])
    teacher = np.array([[0, 1], [1, 2], [2, 3], [2, 3], [3, 5], [5, 7]])
    losses = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    ranges = align_spans(student, teacher)
    given = np.zeros(len(student))
    for token, ((first, last), (a, b, c)) in enumerate(
        zip(ranges, covered_shares(student, teacher, ranges), strict=True)
    ):
        shares = [a, *[b] * (last - first - 2), c][: last - first]
        given[token] = losses[first:last] @ shares
    assert given.tolist() == [3.0, 3.0, 3.0, 3.0, 3.0, 16.0 + 16.0, 16.0]


def test_shares_of_tokens_without_characters_are_whole() -> None:
    # A chat template's tokens have no characters.
    student, teacher = np.array([[0, 2], [2, 4]]), np.array([[1, 1], [1, 3], [3, 3], [3, 4]])
    ranges = align_spans(student, teacher)
    assert ranges.tolist() == [[0, 2], [1, 4]]
    assert covered_shares(student, teacher, ranges).tolist() == [[1.0, 1.0, 0.5], [0.5, 1.0, 1.0]]


def test_shares_of_an_unmapped_token_are_whole() -> None:
    student, nothing = np.array([[0, 2], [2, 3]]), np.empty((0, 2), np.int64)
    assert (covered_shares(student, nothing, align_spans(student, nothing)) == 1).all()


@pytest.mark.parametrize(("student", "teacher"), [(0, 0), (0, 2), (3, 0), (3, 2), (2, 2), (2, 4)])
def test_positions_pair_tokens_of_one_number(student: int, teacher: int) -> None:
    expected = [(t, t + 1) if t < teacher else (-1, -1) for t in range(student)]
    found = align_positions(student, teacher)
    assert found.dtype == np.int64
    assert found.tolist() == [list(pair) for pair in expected]


@given(
    st.lists(st.tuples(st.integers(-3, 400), st.integers(0, 400)), max_size=30), st.integers(0, 3)
)
def test_narrow_spans_are_read_back(moves: list[tuple[int, int]], copies: int) -> None:
    """In any order, overlapping, with gaps and long tokens; several teachers' one after another."""
    spans, end = [], 0
    for begin, length in moves:
        start = max(end + begin, 0)
        end = start + length
        spans.append((start, end))
    array = np.array(spans * copies, dtype=np.int64).reshape(-1, 2)
    codes, exceptions, _ = narrow_spans(array)
    assert (codes.dtype, exceptions.dtype, len(codes)) == (np.uint8, np.int32, len(array))
    for found in ((codes, exceptions), (codes.tolist(), exceptions.tolist())):
        assert widen_spans(*found).tolist() == array.tolist()


def test_narrow_spans_of_plain_text_take_a_byte() -> None:
    spans = np.array([[0, 3], [2, 129], [129, 257]])
    codes, exceptions, _ = narrow_spans(spans)
    # The longest that a byte holds, and one character more.
    assert (codes.tolist(), exceptions.tolist()) == ([6, 253, 255], [2, 128, 0])
    assert narrow_spans(spans[:2])[1].tolist() == []
