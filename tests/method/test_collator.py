"""Batches of packed sequences against a slow reference, token by token."""

from __future__ import annotations

import itertools
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import narrow_spans, widen_spans
from vocagnolm.collator import PackedCollator
from vocagnolm.data import Segments, align_corpus
from vocagnolm.packing import Blocks, segment_rows
from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader

Tokenizers = dict[str, PreTrainedTokenizerFast]


def slow_row(segments: list[Any], size: int, attend_across_documents: bool) -> list[list[int]]:
    """Ids, labels and positions of a row, one token after the other."""
    ids, labels, positions = [0] * size, [-100] * size, [0] * size
    at = 0
    for segment in segments:
        for position, token in enumerate(segment):
            ids[at] = int(token)
            labels[at] = -100 if position == 0 else int(token)
            positions[at] = position
            at += 1
    return [ids, labels, list(range(size)) if attend_across_documents else positions]


def slow_edges(rows: list[list[Any]], size: int, attend_across_documents: bool) -> list[int]:
    """Edges that attention may not cross, with the rows laid end to end."""
    edges = {0}
    longest = max(len(segment) for segments in rows for segment in segments)
    for number, segments in enumerate(rows):
        at, end = number * size, (number + 1) * size
        edges |= {at, end}
        if attend_across_documents:
            continue
        for segment in segments:
            at += len(segment)
            edges.add(at)
        while longest and at < end:  # padding is never the longest segment
            edges.add(at)
            at += longest
    return sorted(edges)


def slow_ranges(sequence: dict[str, Any], length: int) -> tuple[list[list[int]], int, int]:
    """Ranges of a row, and how many of its label tokens have one and how many none."""
    ranges = [[-1, -1] for _ in range(length)]
    mapped = unmapped = at = teacher_at = 0
    for number, segment in enumerate(sequence["student_ids"]):
        for position in range(len(segment)):
            first, last = (
                sequence["ranges"][number][0][position] if "ranges" in sequence else (-1, -1)
            )
            if first >= 0:
                ranges[at] = [int(first) + teacher_at, int(last) + teacher_at]
            if position > 0:
                mapped += int(first >= 0)
                unmapped += int(first < 0)
            at += 1
        teacher_at += len(sequence["teacher_ids"][number]) if "ranges" in sequence else 0
    return ranges, mapped, unmapped


def slow_batch(
    blocks: list[dict[str, Any]], length: int, attend_across_documents: bool
) -> dict[str, Any]:
    batch: dict[str, Any] = {"block": [sequence["block"] for sequence in blocks]}
    sides = [("", "student_ids", length)]
    if is_guided := "teacher_ids" in blocks[0]:
        longest = max(sum(len(ids) for ids in sequence["teacher_ids"]) for sequence in blocks)
        width = next(width for width in itertools.count(0, 64) if width >= longest)
        batch["teacher_widths"] = [width]
        sides.append(("teacher_", "teacher_ids", width))
    for prefix, column, size in sides:
        rows = [slow_row(sequence[column], size, attend_across_documents) for sequence in blocks]
        for index, name in enumerate(("input_ids", "labels", "position_ids")):
            batch[prefix + name] = [row[index] for row in rows]
        edges = slow_edges([sequence[column] for sequence in blocks], size, attend_across_documents)
        longest = max([b - a for a, b in itertools.pairwise(edges)], default=0)
        batch[prefix + "segment_edges"] = [edges] if prefix else edges
        batch[prefix + "longest_segment"] = [longest] if prefix else longest
    found = [slow_ranges(sequence, length) for sequence in blocks]
    for index, name in enumerate(("teacher_ranges", "mapped_tokens", "unmapped_tokens")):
        batch[name] = [row[index] for row in found]
    if is_guided:
        labels = [label for row in batch["teacher_labels"] for label in row if label != -100]
        batch["teacher_label_tokens"] = [len(labels)]
    else:
        del batch["teacher_ranges"]
    return batch


def as_lists(batch: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.tolist() if isinstance(value, torch.Tensor) else value

    return {name: plain(value) for name, value in batch.items()}


@pytest.mark.parametrize("attend_across_documents", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("guided", [True, False])
def test_collator_equals_the_slow_reference(
    aligned: Segments, plain: Segments, guided: bool, rows: int, attend_across_documents: bool
) -> None:
    blocks = Blocks((aligned if guided else plain).rows, 48, 60)
    assert any(len(blocks[i]["student_ids"]) > 2 for i in range(len(blocks)))
    collator = PackedCollator(48, attend_across_documents)
    for start in range(0, len(blocks) - rows + 1, rows):
        chosen = [blocks[index] for index in range(start, start + rows)]
        batch = collator(chosen)
        assert as_lists(batch) == slow_batch(chosen, 48, attend_across_documents)
        tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
        assert {tensor.dtype for tensor in tensors} == {torch.int64, torch.int32}
        edges = (batch["segment_edges"], *batch.get("teacher_segment_edges", ()))
        assert {tensor.dtype for tensor in edges} == {torch.int32}
        counts = (batch["mapped_tokens"][0], batch["longest_segment"])
        assert {type(count) for count in counts} == {int}


def test_longest_segments_are_those_of_the_batches(aligned: Segments, plain: Segments) -> None:
    for segments, width in ((aligned, 60), (aligned, 1000), (plain, 60)):
        blocks = Blocks(segments.rows, 48, width)
        collator = PackedCollator(48, teacher_max_length=width)
        batches = [collator([blocks[number]]) for number in range(len(blocks))]
        names = ("longest_segment", "teacher_longest_segment")
        found = [np.hstack([batch[name] for name in names if name in batch]) for batch in batches]
        expected = np.max(found, axis=0).tolist()
        assert blocks.longest_segments == expected


def test_worked_example_of_shares_of_two_segments() -> None:
    sequence = {
        "block": 7,
        "student_ids": [[1, 10, 11], [1, 12, 2]],
        "teacher_ids": [[90, 20, 21], [90, 23]],
        "teacher_losses": [[], []],
        # The student has "abcd" "e" and "x", the teacher "abc" "de" and "xy".
        "student_codes": [[8, 2], [2]],
        "teacher_codes": [[6, 4], [4]],
        "student_exceptions": [[], []],
        "teacher_exceptions": [[], []],
        "ranges": [[[[-1, -1], [1, 3], [2, 3]]], [[[-1, -1], [1, 2], [-1, -1]]]],
        "teacher_counts": [[3], [2]],
        "student_labelled": [[], []],
        "teacher_labelled": [[], []],
    }
    arrays = {
        name: value if name == "block" else [np.array(segment) for segment in value]  # type: ignore[attr-defined]
        for name, value in sequence.items()
    }
    batch = as_lists(PackedCollator(8, shares=True)([arrays]))
    none, whole = [-1, -1], [1.0, 1.0, 1.0]
    assert batch["teacher_ranges"] == [[none, [1, 3], [2, 3], none, [4, 5], none, none, none]]
    assert batch["teacher_shares"] == [
        [whole, [1.0, 1.0, 0.5], [0.5, 1.0, 1.0], whole, [0.5, 1.0, 1.0], *[whole] * 3]
    ]
    assert "teacher_shares" not in PackedCollator(8)([arrays])


def two_teachers(names: tuple[str, ...]) -> dict[str, Any]:
    none, no = float("nan"), [-1, -1]
    segments: dict[str, list[list[Any]]] = {
        "student_ids": [[1, 10, 11], [1, 12, 2]],
        "teacher_ids": [[90, 20, 21, 80, 30], [90, 22, 80, 31]],
        "teacher_losses": [[none, 0.5, 1.5, none, 2.5], [none, 3.5, none, 4.5]],
        "ranges": [[[no, [1, 2], [2, 3]], [no, [1, 2], no]], [[no, [1, 2], no]] * 2],
        "teacher_counts": [[3, 2], [2, 2]],
        "student_labelled": [[], []],
        "teacher_labelled": [[], []],
    }
    for name in {"teacher_ids", "teacher_losses"} - set(names):
        segments[name] = [[], []]
    arrays = {name: [np.array(row) for row in rows] for name, rows in segments.items()}
    arrays["teacher_losses"] = [row.astype(np.float32) for row in arrays["teacher_losses"]]
    return {"block": 7, **arrays}


@pytest.mark.parametrize(("limits", "widths"), [(None, [64, 64]), ([5, 7], [5, 7])])
def test_worked_example_of_two_stored_teachers(limits: list[int] | None, widths: list[int]) -> None:
    sequence = two_teachers(("teacher_losses",))
    batch = PackedCollator(8, teacher_max_length=limits)([sequence])
    assert "teacher_input_ids" not in batch
    found = batch["teacher_losses"]
    assert (found.dtype, found.shape) == (torch.float32, (1, sum(widths)))
    assert batch["teacher_widths"] == widths
    expected = [-1, 0.5, 1.5, -1, 3.5] + [-1] * (widths[0] - 5)
    expected += [-1, 2.5, -1, 4.5] + [-1] * (widths[1] - 4)
    assert found.nan_to_num(-1.0).tolist() == [expected]
    none, w = [-1, -1], widths[0]
    assert batch["teacher_ranges"].tolist() == [
        [
            *(none, [1, 2], [2, 3], none, [4, 5], none, none, none),
            *(none, [w + 1, w + 2], none, none, [w + 3, w + 4], none, none, none),
        ]
    ]
    # A token counts as mapped if every teacher has it.
    assert (batch["mapped_tokens"], batch["unmapped_tokens"]) == ([2], [2])


def test_labels_of_a_conversation_stay_in_their_ranges() -> None:
    labelled = {"student_labelled": [[2, 3], [1, 2]], "teacher_labelled": [[2, 3, 4, 5], [1, 2]]}
    batch = as_lists(PackedCollator(8)([two_teachers(("teacher_ids",)) | labelled]))
    assert batch["labels"] == [[-100, -100, 11, -100, 12, -100, -100, -100]]
    first, second = batch["teacher_labels"][0][:64], batch["teacher_labels"][0][64:]
    assert first == [-100, -100, 21, -100, 22] + [-100] * 59
    assert second == [-100, 30, -100, -100] + [-100] * 60
    assert batch["teacher_label_tokens"] == [2, 1]
    assert (batch["mapped_tokens"], batch["unmapped_tokens"]) == ([1], [1])


def test_weights_of_a_conversation_stay_in_their_ranges() -> None:
    # The ranges of the second segment, their weights, and those of its tokens.
    for ranges, second, expected in (
        ([], [], [1.0, 1.0, 1.0]),
        ([], [-3.0], [-3.0, -3.0, -3.0]),
        ([1, 2], [-3.0], [1.0, -3.0, 1.0]),
    ):
        labelled = {"student_labelled": [[1, 2, 2, 3], ranges], "teacher_labelled": [[], []]}
        weights = {"student_weights": [[0.5, 2.0], second]}
        sequence = two_teachers(("teacher_ids",)) | labelled | weights
        batch = as_lists(PackedCollator(8)([sequence]))
        assert batch["weights"] == [[1.0, 0.5, 2.0, *expected, 1.0, 1.0]]


@pytest.mark.parametrize("teacher_attends", [False, True])
def test_every_teacher_has_the_rows_it_has_alone(
    tokenizers_by_family: Tokenizers, corpus_texts: list[str], teacher_attends: bool
) -> None:
    student, *others = (
        tokenizers_by_family[name] for name in ("metaspace", "nfc_digits", "byte_level")
    )
    corpus = datasets.Dataset.from_dict({"text": corpus_texts})
    readers = tuple(teacher_reader(tokenizer, 60 + 9 * n) for n, tokenizer in enumerate(others))
    together = align_corpus(corpus, student_reader(student, 48), TeacherReaders(readers))
    limits = TeacherReaders(readers).limits()
    blocks = Blocks(together.rows, 48, limits)
    chosen = [blocks[number] for number in range(min(len(blocks), 9))]
    batch = PackedCollator(48, teacher_attends, limits, shares=True)(chosen)
    at = 0
    for teacher, (width, limit) in enumerate(zip(batch["teacher_widths"], limits, strict=True)):
        alone = [one_teacher(sequence, teacher) for sequence in chosen]
        expected = PackedCollator(48, teacher_attends, limit, shares=True)(alone)
        assert expected["teacher_widths"] == [width]
        for name in ("teacher_input_ids", "teacher_labels", "teacher_position_ids"):
            assert torch.equal(batch[name][:, at : at + width], expected[name])
        assert torch.equal(
            batch["teacher_segment_edges"][teacher], expected["teacher_segment_edges"][0]
        )
        for name in ("teacher_longest_segment", "teacher_label_tokens"):
            assert batch[name][teacher] == expected[name][0]
        labels = expected["teacher_labels"] != -100
        assert batch["teacher_label_tokens"][teacher] == int(labels.sum()) > 0
        ranges = batch["teacher_ranges"][:, 48 * teacher : 48 * (teacher + 1)]
        assert torch.equal(torch.where(ranges < 0, ranges, ranges - at), expected["teacher_ranges"])
        shares = batch["teacher_shares"][:, 48 * teacher : 48 * (teacher + 1)]
        assert torch.equal(shares, expected["teacher_shares"])
        at += width


def one_teacher(sequence: dict[str, Any], teacher: int) -> dict[str, Any]:
    """A sequence as it is without the other teachers."""
    alone: dict[str, Any] = {
        "ranges": [ranges[teacher : teacher + 1] for ranges in sequence["ranges"]]
    }
    names = ("teacher_ids", "teacher_counts", "teacher_codes", "teacher_exceptions")
    alone |= {name: [] for name in names}
    for row in segment_rows(sequence):
        counts = row["teacher_counts"]
        ids = slice(sum(counts[:teacher]), sum(counts[: teacher + 1]))
        text = slice(ids.start - teacher, ids.stop - teacher - 1)
        spans = widen_spans(row["teacher_codes"], row["teacher_exceptions"])[text]
        codes, exceptions, _ = narrow_spans(spans)
        columns = (row["teacher_ids"][ids], counts[teacher : teacher + 1], codes, exceptions)
        for name, column in zip(names, columns, strict=True):
            alone[name].append(column)
    return {**sequence, **alone}


@pytest.mark.parametrize("chunks", [1, 2, 7, 16, 200])
def test_collator_maps_chunks_to_chunks_when_asked(
    aligned: Segments, plain: Segments, chunks: int
) -> None:
    blocks = Blocks(aligned.rows, 48, 60)
    bare = Blocks(plain.rows, 48, 60)
    for number in range(len(blocks)):
        sequence = blocks[number]
        batch = as_lists(PackedCollator(48, chunks=chunks)([sequence]))
        tokens = sum(map(len, sequence["student_ids"]))
        teacher_tokens = sum(map(len, sequence["teacher_ids"]))
        labels = batch["teacher_labels"][0]
        begins = [c * tokens // chunks for c in range(chunks + 1)]
        for position in range(48):
            chunk = max(c for c, begin in enumerate(begins) if begin <= min(position, tokens - 1))
            assert batch["chunk"][0][position] == chunk
            first, last = chunk * teacher_tokens // chunks, (chunk + 1) * teacher_tokens // chunks
            has_loss = any(label != -100 for label in labels[first:last])
            expected = [first, last] if has_loss and position < tokens else [-1, -1]
            assert batch["teacher_ranges"][0][position] == expected
    unguided = PackedCollator(48, chunks=chunks)([bare[0]])
    assert unguided["chunk"].max() == chunks - 1
    assert sum(unguided["mapped_tokens"]) == 0


def sequence_of(tokens: int) -> Any:
    """A sequence whose teacher has `tokens` tokens, none of which guides any."""
    ids, none = np.arange(tokens), np.full((1, 3, 2), -1)
    sequence = {"block": 0, "student_ids": [ids[:3]], "teacher_ids": [ids], "teacher_losses": [[]]}
    sequence |= {"student_labelled": [[]], "teacher_labelled": [[]]}
    return sequence | {"ranges": [none], "teacher_counts": [[tokens]]}


@pytest.mark.parametrize("attend_across_documents", [False, True])
@pytest.mark.parametrize(("tokens", "limit", "width"), [(65, 100, 100), (60, 100, 64), (7, 7, 7)])
def test_collator_stops_padding_at_the_teachers_limit(
    tokens: int, limit: int, width: int, attend_across_documents: bool
) -> None:
    """A learned table of positions ends there: one more position would be out of bounds."""
    sequence = sequence_of(tokens)
    batch = PackedCollator(8, attend_across_documents, teacher_max_length=limit)([sequence])
    for name in ("input_ids", "labels", "position_ids"):
        assert batch[f"teacher_{name}"].shape == (1, width)
    assert batch["teacher_position_ids"].max() < limit
    assert PackedCollator(8)([sequence])["teacher_input_ids"].shape[1] % 64 == 0
