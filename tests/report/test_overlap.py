"""Overlap of vocabularies and of characters against slow references."""

from __future__ import annotations

import itertools

import datasets
import numpy as np
import pytest
from fuzz import FUZZ_PIECES
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from benchmarks.chunks import chunk_overlaps, mean_overlaps, sequences
from vocagnolm.alignment import align_spans
from vocagnolm.collator import chunk_edges
from vocagnolm.conventions import Spans
from vocagnolm.report.audit import (
    count_map,
    decoded_vocabulary,
    map_shares,
    overlaps,
)
from vocagnolm.spans import encode

Tokenizers = dict[str, PreTrainedTokenizerFast]
FAMILIES = ("metaspace", "byte_level", "nfc_digits", "unigram")
texts = st.lists(st.sampled_from(FUZZ_PIECES), min_size=1, max_size=12).map("".join)
pairs = st.tuples(st.sampled_from(FAMILIES), st.sampled_from(FAMILIES))


# Vocabularies


def test_vocabularies_are_compared_by_their_bytes(tokenizers_by_family: Tokenizers) -> None:
    both = [tokenizers_by_family[name] for name in ("metaspace", "byte_level")]
    decoded = [decoded_vocabulary(tokenizer) for tokenizer in both]
    for words in decoded:
        assert words >= {bytes([byte]) for byte in range(256)}
        # Neither a spelling of the space nor of a byte is left.
        for letter in ("Ġ", "▁"):
            assert not any(letter.encode() in word for word in words)
        assert not any(word.startswith(b"<0x") for word in words)
    assert decoded[0] >= {b"<s>", b"</s>", b"<unk>"}
    assert b"<|endoftext|>" in decoded[1]
    ours, theirs = (set(tokenizer.get_vocab()) for tokenizer in both)
    as_letters = {word.replace("▁", "Ġ") for word in ours}
    # Words behind a space are found.
    assert len(decoded[0] & decoded[1]) > len(as_letters & theirs) > len(ours & theirs)


# Characters


def characters(spans: Spans) -> set[int]:
    return {place for start, end in spans.tolist() for place in range(start, end)}


def slow_shares(ours: Spans, theirs: Spans) -> tuple[float, float]:
    a, b = characters(ours), characters(theirs)
    return len(a & b) / len(a | b), len(a & b) / len(a)


@given(text=texts, pair=pairs, data=st.data())
def test_overlaps_equal_sets_for_any_ranges(
    tokenizers_by_family: Tokenizers, text: str, pair: tuple[str, str], data: st.DataObject
) -> None:
    student, teacher = (encode(tokenizers_by_family[name], text).spans for name in pair)
    if not len(teacher) or not len(student):
        return
    cuts = st.lists(st.integers(0, len(teacher)), min_size=2, max_size=2, unique=True).map(sorted)
    one = st.one_of(st.just([-1, -1]), cuts)
    ranges = np.array(data.draw(st.lists(one, min_size=len(student), max_size=len(student))))
    iou, ios = overlaps(student, teacher, ranges)
    for index, (first, end) in enumerate(ranges.tolist()):
        expected = (0.0, 0.0)
        if first >= 0:
            expected = slow_shares(student[index : index + 1], teacher[first:end])
        assert (iou[index], ios[index]) == expected


@given(text=texts, pair=pairs, chunks=st.integers(1, 20))
def test_chunk_overlaps_equal_sets_of_characters(
    tokenizers_by_family: Tokenizers, text: str, pair: tuple[str, str], chunks: int
) -> None:
    student, teacher = (encode(tokenizers_by_family[name], text).spans for name in pair)
    ours, theirs = chunk_edges(len(student), chunks), chunk_edges(len(teacher), chunks)
    expected = [
        slow_shares(student[ours[c] : ours[c + 1]], teacher[theirs[c] : theirs[c + 1]])
        for c in range(chunks)
        if ours[c] < ours[c + 1]
    ]
    iou, ios = chunk_overlaps(student, teacher, chunks)
    assert list(zip(iou.tolist(), ios.tolist(), strict=True)) == expected


def test_chunks_are_means_over_sequences_of_whole_documents(
    tokenizers_by_family: Tokenizers, training_texts: list[str]
) -> None:
    student, teacher = (tokenizers_by_family[name] for name in ("metaspace", "byte_level"))
    corpus = datasets.Dataset.from_dict({"text": training_texts[:90]})
    pairs = []
    begun = set()
    for text, spans in itertools.islice(sequences(corpus, student, 64), 5):
        assert len(spans) == 64
        assert spans[-1, 1] == len(text)
        assert np.array_equal(encode(student, text).spans[:60], spans[:60])
        begun.add(next(n for n, whole in enumerate(training_texts) if whole[:20] == text[:20]))
        pairs.append((spans, encode(teacher, text).spans))
    assert begun != set(range(5))  # in random order
    means = [chunk_overlaps(*pair, 8)[0].mean() for pair in pairs]
    found = mean_overlaps(pairs, 8)
    assert found["iou"] == pytest.approx(np.mean(means))
    assert found["iou_standard_error"] == pytest.approx(np.std(means, ddof=1) / np.sqrt(5))


# Counts


@given(text=texts, pair=pairs)
def test_count_map_counts_every_kind(
    tokenizers_by_family: Tokenizers, text: str, pair: tuple[str, str]
) -> None:
    student, teacher = (encode(tokenizers_by_family[name], text).spans for name in pair)
    aligned = align_spans(student, teacher)
    ranges = aligned.tolist()
    sizes = [end - first for first, end in ranges]
    same = straddling = shared = 0
    for index, (first, end) in enumerate(ranges):
        if first < 0:
            continue
        covered = [int(teacher[first, 0]), int(teacher[first:end, 1].max())]
        start, stop = student[index].tolist()
        same += end - first == 1 and covered == [start, stop]
        straddling += covered[0] < start or covered[1] > stop
        shared += index > 0 and first in range(*ranges[index - 1])
    counts = count_map(student, teacher, aligned)
    several = sum(size > 1 for size in sizes)
    assert tuple(counts.values())[:7] == (
        *(len(student), len(teacher), sizes.count(0), several, same, shared, straddling),
    )


def test_shares_divide_by_the_right_total() -> None:
    counts = {"student_tokens": 5, "teacher_tokens": 4, "unmapped": 1, "several": 2}
    counts |= {"same_span": 2, "shared": 1, "straddling": 2, "iou_sum": 3, "ios_sum": 4}
    assert map_shares(counts) == {
        "teacher_tokens_per_student_token": 0.8,
        "mapped": 0.8,
        "unmapped": 0.2,
        "one_to_one": 0.4,
        "one_to_many": 0.4,
        "many_to_one": 0.2,
        "straddling": 0.4,
        "iou": 0.6,
        "ios": 0.8,
    }


def test_everything_is_unmapped_when_teacher_has_no_tokens() -> None:
    student, teacher = np.array([[0, 2], [2, 3]]), np.zeros((0, 2), dtype=np.int64)
    counts = count_map(student, teacher, align_spans(student, teacher))
    assert (counts["unmapped"], counts["iou_sum"], counts["ios_sum"]) == (2, 0.0, 0.0)
    assert np.array_equal(chunk_overlaps(student, teacher, 2), np.zeros((2, 2)))
