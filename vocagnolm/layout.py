"""Segments of many documents as flat columns, a row for each segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vocagnolm.alignment import find_ranges
from vocagnolm.conventions import UNMAPPED, IntArray, Spans
from vocagnolm.spans import Tokens


class _Part(NamedTuple):
    """A model's tokens of each segment, concatenated; spans are on the axis of all texts."""

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
    """Make the columns of `data.Segments` of segments [S, 3] of texts: text, start and end.

    A column has integers, or is (edges, values) of arrays. A token that a cut goes through is in
    both segments, one of a chat template has no characters. Teachers' tokens follow one another in
    a row, each behind its start token, which has no span:

        B a b c | B d e         counts [4, 3]
          0 1 2     3 4         spans
    """
    texts, starts, ends = segments.T
    is_last = ends == lengths[texts]
    # All texts on one axis, with a character before and behind each:
    #
    #   axis       0  1 .. 5  6  7  8 .. 9  10
    #   texts      -  abcde   -  -  xy      -       origins 1, 8
    #
    # so that tokens without characters, at the edges of a text, are in its first or last segment.
    origins = np.cumsum(lengths + 2) - lengths - 1
    low, high = origins[texts] + starts, origins[texts] + ends
    reach = low - (starts == 0), high + is_last
    ours, *theirs = (_between(one, origins, low, high, reach) for one in (student, *teachers))
    segment, unmapped = ours.segments, np.full(len(ours.spans), not theirs)
    for part in theirs:
        if by_position:
            unmapped |= _ranges(0 * ours.counts, ours.counts) >= part.counts[segment]
        else:
            unmapped |= find_ranges(ours.spans, part.spans)[:, 0] == UNMAPPED
    has_text = ours.spans[:, 0] < ours.spans[:, 1]
    one, closed = np.ones_like(texts), (is_last & (student.end is not None)).astype(np.int64)
    start, end = np.full(len(one), student.start), np.full(closed.sum(), student.end or 0)
    columns = {
        "start": starts,
        "end": ends,
        "student_ids": _rows((one, start), (ours.counts, ours.values), (closed, end)),
        "student_tokens": 1 + ours.counts + closed,
        "teacher_tokens": sum((1 + part.counts for part in theirs), 0 * texts),
        "text_tokens": np.bincount(segment[has_text], minlength=len(texts)),
        "unmapped_text_tokens": np.bincount(segment[has_text & unmapped], minlength=len(texts)),
        "student_spans": _rows((ours.counts, ours.spans - low[segment, None])),
    }
    if theirs:
        tokens, spans = [], []
        for model, part in zip(teachers, theirs, strict=True):
            tokens += [(one, np.full(len(one), model.start)), (part.counts, part.values)]
            spans.append((part.counts, part.spans - low[part.segments, None]))
        is_ids = teachers[0].values.dtype.kind == "i"
        columns["teacher_ids" if is_ids else "teacher_losses"] = _rows(*tokens)
        columns["teacher_counts"] = _rows(*((one, 1 + part.counts) for part in theirs))
        columns["teacher_spans"] = _rows(*spans)
    return columns


def _between(
    model: Tokens, origins: IntArray, low: IntArray, high: IntArray, reach: tuple[IntArray, ...]
) -> _Part:
    """Take the tokens of each segment [low, high), and clip those that reach beyond it."""
    spans = model.spans + np.repeat(origins, np.diff(model.edges))[:, None]
    # Up to those that end there, and those that a cut goes through.
    first = spans[:, 1].searchsorted(reach[0], side="right")
    ending = spans[:, 1].searchsorted(reach[1], side="right")
    counts = np.maximum(ending, spans[:, 0].searchsorted(reach[1])) - first
    token, segment = _ranges(first, counts), np.repeat(np.arange(len(counts)), counts)
    clipped = spans[token].clip(low[segment, None], high[segment, None])
    return _Part(counts, segment, model.values[token], clipped)


def _ranges(first: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges [first, first + count).

    >>> _ranges(np.array([7, 2]), np.array([3, 2])).tolist()
    [7, 8, 9, 2, 3]
    """
    begins = np.cumsum(counts) - counts
    ranges: IntArray = np.arange(counts.sum()) + np.repeat(first - begins, counts)
    return ranges


def _rows(*parts: tuple[IntArray, npt.NDArray[Any]]) -> tuple[IntArray, npt.NDArray[Any]]:
    """Concatenate, row by row, so many values of each part: (edges of the rows, all values).

    >>> _rows((np.array([1, 1]), np.array([0, 0])), (np.array([2, 1]), np.array([7, 8, 9])))
    (array([0, 3, 5]), array([0, 7, 8, 0, 9]))
    """
    edges = np.append(0, np.cumsum(sum(counts for counts, _ in parts)))
    shape = (edges[-1], *parts[0][1].shape[1:])
    rows = np.empty(shape, np.result_type(*(values for _, values in parts)))
    begins = edges[:-1]
    for counts, values in parts:
        rows[_ranges(begins, counts)] = values
        begins = begins + counts
    return edges, rows
