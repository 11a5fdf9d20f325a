"""Cut documents into segments that every model can hold, and lay their tokens out in rows.

Enters: texts, and the tokens of every model in them. Leaves: the columns of `data.Segments`, made
for all documents of a batch at once. Knows no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.alignment import find_ranges, narrow_rows
from vocagnolm.conventions import UNMAPPED
from vocagnolm.spans import Spans
from vocagnolm.tokenizers import Tokens

IntArray = npt.NDArray[np.int64]

# Why a document is skipped that a guide does not know.
MISSING = "not in the teacher-loss store, or another text there"
EMPTY = "a tokenizer finds no token in it"
# Aim below the limit: a good place to cut is looked for before it.
_FILL = 0.95


def cut_documents(
    texts: Sequence[str],
    models: Sequence[Tokens],
    limits: Sequence[int],
    given: Mapping[int, Sequence[int] | None],
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Cut the documents that are too long for a model: `limits` are the most tokens of a segment.

    Documents are `given` places where they must be cut, None where they are not known. Returns the
    edges of the segments of each document that is cut, and the reasons why others are skipped.
    """
    counts = np.stack([np.diff(model.edges) for model in models])
    fits = ((counts > 0) & (counts <= np.array(limits)[:, None])).all(0)
    cuts: dict[int, list[int]] = {}
    skipped: dict[int, str] = {}
    for number in sorted({*np.flatnonzero(~fits).tolist(), *given}):
        marks = given.get(number, ())
        if marks is None or not counts[:, number].all():
            skipped[number] = MISSING if marks is None else EMPTY
            continue
        spans = [one.spans[one.edges[number] : one.edges[number + 1]] for one in models]
        found = _cut(texts[number], spans, limits, marks)
        if isinstance(found, str):
            skipped[number] = found
        else:
            cuts[number] = found
    return cuts, skipped


def _cut(
    text: str, models: Sequence[Spans], limits: Sequence[int], marks: Sequence[int]
) -> list[int] | str:
    """Cut a document at marks, and into about equal parts; return the edges, or why it cannot be.

    No token of a model goes through a cut, where there is such a place; a paragraph, line or word
    ends there, if one ends in the last eighth before the limit.
    """
    places = np.zeros((len(models), len(text) + 1), np.bool_)
    for free, spans in zip(places, models, strict=True):
        free[spans[:-1, 1][spans[1:, 0] >= spans[:-1, 1]]] = True
    # Of all models, or else of the student.
    places = np.stack((places.all(axis=0), places[0]))
    edges = [0]
    for mark in (*marks, len(text)):
        while True:
            at = edges[-1]
            first = [spans[:, 1].searchsorted(at, side="right") for spans in models]
            last = [spans[:, 0].searchsorted(mark, side="left") for spans in models]
            tokens = zip(first, last, limits, strict=True)
            share = max((b - a) / limit for a, b, limit in tokens)
            if share <= 1:
                break
            # Equal parts of what is left; all of a context if a character has so many tokens.
            for aim in (share / math.ceil(share / _FILL), 1.0):
                behind = zip(models, first, limits, strict=True)
                reach = ((one, a + int(aim * limit)) for one, a, limit in behind)
                stop = min(int(one[n, 0]) if n < len(one) else mark for one, n in reach)
                if stop > at:
                    break
            else:
                return f"character {at} alone exceeds a context"
            edges.append(_best(text, places, at, stop))
        edges.append(mark)
    first = [spans[:, 1].searchsorted(edges[:-1], side="right") for spans in models]
    last = [spans[:, 0].searchsorted(edges[1:], side="left") for spans in models]
    is_empty = any((a >= b).any() for a, b in zip(first, last, strict=True))
    return EMPTY if is_empty else edges


def _best(text: str, places: npt.NDArray[np.bool_], start: int, stop: int) -> int:
    """Find the best place to cut in the last eighth up to `stop`, or else half, and the last of it.

    start ........................ half ......... eighth ....... stop
    """

    def rank(place: int) -> int:
        before, after = text[max(place - 2, 0) : place], text[place : place + 1]
        if before.endswith("\n"):
            return 0 if before == "\n\n" else 1
        return 2 if before.endswith(" ") or after == " " else 3

    best = []
    for free, part in product(places, (8, 2)):
        floor = stop - (stop - start) // part
        found = np.flatnonzero(free[floor + 1 : stop + 1])[::-1] + floor + 1
        best += [min(found.tolist(), key=rank)] if len(found) else []
        if best and rank(best[-1]) < 3:
            return best[-1]
    return best[0] if best else stop


@dataclass(frozen=True, eq=False)
class Segmentation:
    """S segments of documents: numbers of these, and the first character and the one behind."""

    documents: IntArray
    starts: IntArray
    ends: IntArray
    is_last: npt.NDArray[np.bool_]
    # First segment of each document that is cut.
    cuts: Mapping[int, tuple[int, Sequence[int]]]

    @classmethod
    def of(
        cls, lengths: IntArray, cuts: Mapping[int, Sequence[int]], skipped: Mapping[int, str]
    ) -> Segmentation:
        """Make a segment of each document that is neither cut nor skipped."""
        counts = np.ones(len(lengths), np.int64)
        for number, edges in cuts.items():
            counts[number] = len(edges) - 1
        counts[list(skipped)] = 0
        documents = np.repeat(np.arange(len(lengths)), counts)
        starts, ends = np.zeros_like(documents), lengths[documents]
        is_last = np.ones(len(documents), np.bool_)
        first, placed = np.cumsum(counts) - counts, {}
        for number, edges in cuts.items():
            at = int(first[number])
            placed[number] = at, edges
            starts[at : at + len(edges) - 1], ends[at : at + len(edges) - 1] = edges[:-1], edges[1:]
            is_last[at : at + len(edges) - 2] = False
        return cls(documents, starts, ends, is_last, placed)

    def tokens(self, model: Tokens) -> Part:
        """Take a model's tokens of each segment; one that a cut goes through is in both."""
        first, last = model.edges[self.documents], model.edges[self.documents + 1]
        for number, (at, edges) in self.cuts.items():
            base = model.edges[number]
            spans, inner = model.spans[base : model.edges[number + 1]], edges[1:-1]
            begin = base + spans[:, 1].searchsorted(inner, side="right")
            through = base + spans[:, 0].searchsorted(inner, side="left")
            first[at + 1 : at + 1 + len(inner)] = begin
            last[at : at + len(inner)] = np.maximum(begin, through)
        counts = last - first
        take = count_on(first, counts)
        spans = model.spans[take]
        if self.cuts:
            spans -= np.repeat(self.starts, counts)[:, None]
            np.clip(spans, 0, np.repeat(self.ends - self.starts, counts)[:, None], out=spans)
        return Part(model, counts, model.values[take], spans)


@dataclass(frozen=True, eq=False)
class Part:
    """A model's tokens of each segment, laid end to end; spans are in characters of the segment."""

    model: Tokens
    counts: IntArray
    values: npt.NDArray[Any]
    spans: Spans


def count_on(first: IntArray, counts: IntArray) -> IntArray:
    """Count on from each first number.

    >>> count_on(np.array([3, 7]), np.array([2, 3])).tolist()
    [3, 4, 7, 8, 9]
    """
    numbers = np.repeat(first - np.cumsum(counts) + counts, counts)
    return numbers + np.arange(len(numbers))


def lay_out(
    segments: Segmentation, student: Tokens, teachers: Sequence[Tokens], by_position: bool
) -> dict[str, Any]:
    """Make the columns of `data.Segments`: numbers, or (edges, values) of arrays."""
    ours = segments.tokens(student)
    theirs = [*map(segments.tokens, teachers)]
    closed = segments.is_last & (student.end is not None)
    widths, _, edges = _place(theirs, 1, closed)
    read = (
        "teacher_ids"
        if any(teacher.values.dtype.kind == "i" for teacher in teachers)
        else "teacher_losses"
    )
    columns = {
        "document": segments.documents,
        "start": segments.starts,
        "end": segments.ends,
        "student_ids": _values([ours], closed, student.end),
        read: _values(theirs, np.zeros_like(closed)),
        "student_tokens": 1 + ours.counts + closed,
        "teacher_tokens": np.diff(edges),
        "teacher_counts": (np.arange(len(edges)) * len(theirs), widths.ravel()),
        "unmapped_text_tokens": _count_unmapped(segments, ours, theirs, by_position),
    }
    for name, parts in (("student", [ours]), ("teacher", [] if by_position else theirs)):
        _, firsts, edges = _place(parts, 0, closed)
        spans = np.empty((edges[-1], 2), np.int64)
        for part, first in zip(parts, firsts.T, strict=True):
            spans[count_on(first, part.counts)] = part.spans
        steps, jumps, jump_edges = narrow_rows(spans, edges)
        columns |= {f"{name}_steps": (edges, steps), f"{name}_jumps": (jump_edges, jumps)}
    return columns


def _place(
    parts: Sequence[Part], special: int | IntArray, rows: npt.NDArray[np.bool_]
) -> tuple[IntArray, IntArray, IntArray]:
    """Place the parts of each row behind one another, with room for special tokens.

    Returns the widths and the starts of the parts [S, K], and the edges of the rows [S + 1].
    """
    counts = [part.counts + special for part in parts]
    widths = np.array(counts, np.int64).reshape(len(parts), len(rows)).T
    ends = np.cumsum(widths).reshape(widths.shape)
    return widths, ends - widths, np.append(0, np.cumsum(widths.sum(axis=1)))


def _values(
    parts: Sequence[Part], closed: npt.NDArray[np.bool_], end: int | None = None
) -> tuple[IntArray, npt.NDArray[Any]]:
    """Lay out ids or losses, each part behind its start token; `closed` rows have an end token.

    B a b c | B d e         counts of two teachers: 4, 3
      0 1 2     3 4         numbers of the spans, which start tokens have not
    """
    _, firsts, edges = _place(parts, 1 + closed, closed)
    values = np.empty(edges[-1], parts[0].values.dtype if parts else np.int32)
    for part, first in zip(parts, firsts.T, strict=True):
        values[first] = part.model.start
        values[count_on(first + 1, part.counts)] = part.values
    if end is not None:
        values[edges[1:][closed] - 1] = end
    return edges, values


def _count_unmapped(
    segments: Segmentation, ours: Part, theirs: Sequence[Part], by_position: bool
) -> IntArray:
    """Count the student's tokens of each segment that some teacher has no token for."""
    unmapped = np.full(len(ours.values), not theirs)
    # All segments on one axis of characters.
    lengths = segments.ends - segments.starts
    origins = np.cumsum(lengths) - lengths
    for part in theirs:
        if by_position:
            numbers = count_on(np.zeros_like(ours.counts), ours.counts)
            unmapped |= numbers >= np.repeat(part.counts, ours.counts)
        else:
            sides = (one.spans + np.repeat(origins, one.counts)[:, None] for one in (ours, part))
            unmapped |= find_ranges(*sides)[:, 0] == UNMAPPED
    before = np.append(0, np.cumsum(unmapped))
    return np.diff(before[np.append(0, np.cumsum(ours.counts))])
