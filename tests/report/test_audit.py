"""The audit: overlaps and counts against slow references, and what the command writes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from fuzz import FUZZ_PIECES
from hypothesis import given
from hypothesis import strategies as st
from real_data import real_data
from transformers import PreTrainedTokenizerFast

from benchmarks import chunks
from benchmarks.chunks import chunk_overlaps, mean_overlaps, sequences
from vocagnolm import __main__
from vocagnolm.alignment import align_spans
from vocagnolm.collator import chunk_edges
from vocagnolm.conventions import Spans
from vocagnolm.report import audit as audit_module
from vocagnolm.report.audit import (
    audit,
    count_map,
    decoded_vocabulary,
    map_shares,
    overlaps,
    verdict,
    vocabulary_overlap,
)
from vocagnolm.spans import encode
from vocagnolm.tokenizer import load_tokenizer

Tokenizers = dict[str, PreTrainedTokenizerFast]
FAMILIES = ("metaspace", "byte_level", "nfc_digits", "unigram")
texts = st.lists(st.sampled_from(FUZZ_PIECES), min_size=1, max_size=12).map("".join)
pairs = st.tuples(st.sampled_from(FAMILIES), st.sampled_from(FAMILIES))
# The paper's overlap, in percent of the teacher's vocabulary; then over bytes (docs/audit.md).
REAL = {
    "mistral-7b-v0.1": (75.58, 75.57),
    "llemma-7b": (99.95, 99.95),
    "deepseek-math-7b": (9.61, 24.24),
    "qwen2.5": (6.32, 17.37),
}


def corpus_of(texts: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts})


def spans_of(tokenizers: Tokenizers, text: str, pair: tuple[str, str]) -> tuple[Spans, Spans]:
    student, teacher = pair
    return encode(tokenizers[student], text).spans, encode(tokenizers[teacher], text).spans


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


def test_vocabulary_overlap_is_a_share_of_the_teachers_tokens(
    tokenizers_by_family: Tokenizers,
) -> None:
    student, teacher = (tokenizers_by_family[family] for family in ("byte_level", "metaspace"))
    ours, theirs = set(student.get_vocab()), set(teacher.get_vocab())
    assert len(ours) != len(theirs)
    assert vocabulary_overlap(student, teacher)["raw"] == len(ours & theirs) / len(theirs)


@pytest.mark.slow
def test_vocabulary_overlap_is_the_papers(training_texts: list[str]) -> None:
    root = real_data("tokenizers")
    student = load_tokenizer(str(root / "tinyllama"), "student")
    teachers = {name: load_tokenizer(str(root / name), "teacher") for name in REAL}
    found = audit(student, teachers, corpus_of(training_texts[:50]))
    for teacher in found["teachers"]:
        overlap = teacher["vocabulary_overlap"]
        shares = tuple(round(100 * overlap[kind], 2) for kind in ("raw", "bytes"))
        assert shares == REAL[teacher["teacher"]]
        assert teacher["mapping"]["ios"] == 1.0
        assert teacher["mapping"]["unmapped"] == 0


# Characters


def slow_shares(ours: Spans, theirs: Spans) -> tuple[float, float]:
    a = {place for start, end in ours.tolist() for place in range(start, end)}
    b = {place for start, end in theirs.tolist() for place in range(start, end)}
    return len(a & b) / len(a | b), len(a & b) / len(a)


@given(text=texts, pair=pairs, data=st.data())
def test_overlaps_equal_sets_for_any_ranges(
    tokenizers_by_family: Tokenizers, text: str, pair: tuple[str, str], data: st.DataObject
) -> None:
    student, teacher = spans_of(tokenizers_by_family, text, pair)
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
    student, teacher = spans_of(tokenizers_by_family, text, pair)
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
    pairs = []
    begun = set()
    drawn = sequences(corpus_of(training_texts[:90]), student, 64)
    for text, spans in itertools.islice(drawn, 5):
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
    student, teacher = spans_of(tokenizers_by_family, text, pair)
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
    counts = {"student_tokens": 10, "teacher_tokens": 8, "unmapped": 1, "several": 2}
    counts |= {"same_span": 3, "shared": 4, "straddling": 5, "iou_sum": 6, "ios_sum": 7}
    expected = {"teacher_tokens_per_student_token": 0.8, "mapped": 0.9, "unmapped": 0.1}
    expected |= {"one_to_one": 0.3, "one_to_many": 0.2, "many_to_one": 0.4, "straddling": 0.5}
    assert map_shares(counts) == expected | {"iou": 0.6, "ios": 0.7}


# Audits


def test_audit_adds_up_batches(
    tokenizers_by_family: Tokenizers, training_texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    student = tokenizers_by_family["metaspace"]
    teachers = {name: tokenizers_by_family[name] for name in ("byte_level", "metaspace")}
    content = audit(student, teachers, corpus_of(training_texts[:90]))
    summed = Counter[str]()
    for text in training_texts[:90]:
        spans = spans_of(tokenizers_by_family, text, ("metaspace", "byte_level"))
        summed.update(count_map(*spans, align_spans(*spans)))
    other, same = [teacher["mapping"] for teacher in content["teachers"]]
    assert other == pytest.approx(map_shares(summed))
    assert (same["iou"], same["ios"], same["one_to_one"]) == (1.0, 1.0, 1.0)
    monkeypatch.setattr(audit_module, "_BATCH", 7)
    again = audit(student, teachers, corpus_of(training_texts[:90]))
    assert again == content
    # Documents without a token are skipped for all teachers.
    found = audit(student, teachers, corpus_of(["", None, "   ", training_texts[0]]))
    assert (found["documents"], found["skipped"]) == (1, 3)
    with pytest.raises(ValueError, match="no usable document: 3 read"):
        audit(student, teachers, corpus_of(["", None, "   "]))


def test_verdict_warns_of_unmapped_and_straddling_tokens() -> None:
    fit = {"mapped": 1.0, "unmapped": 0.0, "one_to_one": 0.9, "straddling": 0.05}
    assert verdict(fit).startswith("a good pair")
    assert "--aggregation" not in verdict(fit)
    assert "--aggregation share" in verdict(fit | {"straddling": 0.15})
    assert verdict(fit | {"mapped": 0.97, "unmapped": 0.03}).startswith("a poor pair")


def test_command_writes_table_and_json(
    tmp_path: Path,
    tokenizer_dirs: dict[str, Path],
    training_texts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pages, out = tmp_path / "pages.jsonl", tmp_path / "a" / "out"
    lines = (json.dumps({"body": text}) + "\n" for text in training_texts[:60])
    pages.write_text("".join(lines), encoding="utf-8")
    argv = ["audit", "--dataset", str(pages), "--text_column", "body", "--documents", "50"]
    argv += ["--student", str(tokenizer_dirs["metaspace"]), "--output_dir", str(out)]
    argv += ["--teacher", str(tokenizer_dirs["nfc_digits"]), str(tokenizer_dirs["byte_level"])]
    # A second audit replaces the first one's files.
    for _ in range(2):
        assert __main__.main(argv) == 0
        shown = capsys.readouterr().out
        assert shown == (out / "audit.md").read_text(encoding="utf-8")
    found = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    assert (found["documents"], len(found["teachers"])) == (50, 2)
    for teacher in found["teachers"]:
        assert 0 < teacher["mapping"]["iou"] <= teacher["mapping"]["ios"] == 1
    # The documents of an audit are cut into chunks.
    chunked = tmp_path / "chunks.json"
    argv = ["--audit", str(out / "audit.json"), "--output", str(chunked)]
    chunks.main([*argv, "--sequence_length", "64", "--sequences", "5"])
    for teacher in json.loads(chunked.read_text(encoding="utf-8"))["teachers"]:
        coarse, *_, fine = teacher["chunks"]
        assert 1 > coarse["ios"] > fine["ios"] > 0
        assert coarse["ios_standard_error"] > 0
