"""Lays out the segments of many documents as flat columns, one row for each segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vocagnolm.alignment import find_ranges
from vocagnolm.conventions import UNMAPPED, IntArray, Spans
from vocagnolm.spans import Tokens


class _Part(NamedTuple):
    """A model's tokens of all segments, concatenated, with spans on a common axis of all texts."""

    counts: IntArray
    segments: IntArray  # of each token
    values: npt.NDArray[Any]
    spans: Spans


def lay_out(
    segments: IntArray,
    lengths: IntArray,
    student: Tokens,
    teachers: Sequence[Tokens],
    by_position: bool = False,
) -> dict[str, Any]:
    """Make the columns of `data.Segments` from segments [S, 3] of texts: text, start and end.

    A column has integers, or is (edges, values) of arrays. A token that is split by a cut is in
    both segments. A token of a chat template has no characters. In a row, the tokens of several
    teachers follow each other, each teacher's after its start token, which has no span:

        B a b c | B d e         counts [4, 3]
          0 1 2     3 4         spans
    """
    texts, starts, ends = segments.T
    is_last = ends == lengths[texts]
    # All texts lie on one axis, with a character before and after each:
    #
    #   axis       0  1 .. 5  6  7  8 .. 9  10
    #   texts      -  abcde   -  -  xy      -       origins 1, 8
    #
    # so that tokens without characters, at the edges of a text, are in its first or last segment.
    origins = np.cumsum(lengths + 2) - lengths - 1
    low = origins[texts] + starts
    high = origins[texts] + ends
    # A text's first and last segment also include the extra character next to them.
    reach = low - (starts == 0), high + is_last
    student_part = _between(student, origins, low, high, reach)
    teacher_parts = [_between(teacher, origins, low, high, reach) for teacher in teachers]
    # Which student tokens have text, and which of these are covered by no teacher token.
    segment = student_part.segments
    has_text = student_part.spans[:, 0] < student_part.spans[:, 1]
    is_unmapped = np.full(len(student_part.spans), not teacher_parts)
    for part in teacher_parts:
        if by_position:
            # A token has a partner if the teacher has a token with the same number in the segment.
            position = _ranges(0 * student_part.counts, student_part.counts)
            is_unmapped |= position >= part.counts[segment]
        else:
            is_unmapped |= find_ranges(student_part.spans, part.spans)[:, 0] == UNMAPPED
    # A student's row is its start token, the text, and in the last segment the end token.
    one_each = np.ones_like(texts)
    start_ids = np.full(len(texts), student.start)
    has_end = (is_last & (student.end is not None)).astype(np.int64)
    end_ids = np.full(has_end.sum(), student.end or 0)
    student_counts = student_part.counts
    columns = {
        "start": starts,
        "end": ends,
        "student_ids": _rows(
            (one_each, start_ids), (student_counts, student_part.values), (has_end, end_ids)
        ),
        "student_tokens": 1 + student_counts + has_end,
        # Without a teacher, the sum is its second argument: a zero for each segment.
        "teacher_tokens": sum((1 + part.counts for part in teacher_parts), 0 * texts),
        "text_tokens": np.bincount(segment[has_text], minlength=len(texts)),
        "unmapped_text_tokens": np.bincount(segment[has_text & is_unmapped], minlength=len(texts)),
        # A row counts characters from the start of its segment.
        "student_spans": _rows((student_counts, student_part.spans - low[segment, None])),
    }
    if teacher_parts:
        # A row of the teachers is the start token and the text of each, one after the other.
        values = []
        spans = []
        counts = []
        for teacher, part in zip(teachers, teacher_parts, strict=True):
            values.append((one_each, np.full(len(texts), teacher.start)))
            values.append((part.counts, part.values))
            spans.append((part.counts, part.spans - low[part.segments, None]))
            counts.append((one_each, 1 + part.counts))
        # Losses of a store are floats. Teachers are all online or all stored, so the first one
        # shows which.
        is_ids = teachers[0].values.dtype.kind == "i"
        columns["teacher_ids" if is_ids else "teacher_losses"] = _rows(*values)
        columns["teacher_counts"] = _rows(*counts)
        columns["teacher_spans"] = _rows(*spans)
    return columns


def _between(
    model: Tokens, origins: IntArray, low: IntArray, high: IntArray, reach: tuple[IntArray, ...]
) -> _Part:
    """Take the tokens of each segment [low, high), and clip those that extend beyond it."""
    # Texts do not overlap on the axis, so the spans of all texts are sorted, and one search finds
    # the tokens of all segments.
    spans = model.spans + np.repeat(origins, np.diff(model.edges))[:, None]
    # The first token that ends after the segment begins.
    first = spans[:, 1].searchsorted(reach[0], side="right")
    # The first token that ends after the segment does, or the first one that starts after it if a
    # token is split.
    end_by_ends = spans[:, 1].searchsorted(reach[1], side="right")
    end_by_starts = spans[:, 0].searchsorted(reach[1])
    counts = np.maximum(end_by_ends, end_by_starts) - first
    token = _ranges(first, counts)
    segment = np.repeat(np.arange(len(counts)), counts)
    clipped = spans[token].clip(low[segment, None], high[segment, None])
    return _Part(counts, segment, model.values[token], clipped)


def _ranges(first: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges [first, first + count).

    >>> _ranges(np.array([7, 2]), np.array([3, 2])).tolist()
    [7, 8, 9, 2, 3]
    """
    # Value n of the result belongs to a range that begins at begins[i] there, so it is n -
    # begins[i] more than first[i].
    begins = np.cumsum(counts) - counts
    ranges: IntArray = np.arange(counts.sum()) + np.repeat(first - begins, counts)
    return ranges


def _rows(*parts: tuple[IntArray, npt.NDArray[Any]]) -> tuple[IntArray, npt.NDArray[Any]]:
    """Concatenate `counts` values of each part, row by row: (edges of the rows, all values).

    >>> _rows((np.array([1, 1]), np.array([0, 0])), (np.array([2, 1]), np.array([7, 8, 9])))
    (array([0, 3, 5]), array([0, 7, 8, 0, 9]))
    """
    row_lengths = sum(counts for counts, _ in parts)
    edges = np.append(0, np.cumsum(row_lengths))
    shape = (edges[-1],) + parts[0][1].shape[1:]
    rows = np.empty(shape, np.result_type(*[values for _, values in parts]))
    # Where the next part of each row begins.
    begins = edges[:-1]
    for counts, values in parts:
        rows[_ranges(begins, counts)] = values
        begins = begins + counts
    return edges, rows
