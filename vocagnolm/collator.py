"""Lay blocks out as the rows of a batch, with teacher ranges relative to the teachers' rows.

Enters: blocks (`vocagnolm.packing`). Leaves: a batch. Knows neither tokenizers nor models.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vocagnolm.alignment import chunk_edges
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.packing import IntArray, limits_of_teachers, padded_width
from vocagnolm.row_segments import RowSegments, segments_of

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackedCollator:
    """Lay blocks out as the rows of a batch.

    Position ids restart at every segment, which is how the models of `transformers` know that
    attention must not cross; no attention mask may be passed. Padding is a segment of its own.
    A teacher's rows are padded to the next multiple of 64 after the longest one, so that their
    shapes are few.

    Attributes:
        max_length: S, student positions of a row.
        attend_across_documents: let position ids, and so attention, run through the whole block.
        teacher_max_length: the most teacher positions of a row, where padding ends; give what the
            blocks were packed with. Without it padding may exceed a context that is no multiple
            of 64, and so a learned table of positions.
        chunks: map every token of chunk c of a row to chunk c of the teacher's row (Section 6.1)
            instead of to the teacher tokens that cover it.

    A batch holds (B rows, S student and T teacher positions, every label and range indexed by the
    token it belongs to):

    - `input_ids`, `labels`, `position_ids` [B, S]: labels are -100 at padding and where a segment
      starts, as nothing predicts its first token;
    - `segment_edges`, int32, and `longest_segment`: the same segments once more, as
      `vocagnolm.row_segments.RowSegments` has them, for attention that asks for it; padding is
      cut into pieces, none longer than the longest segment;
    - `teacher_input_ids`, `teacher_labels`, `teacher_position_ids` [B, T];
    - `teacher_segment_edges`, `teacher_longest_segment`: lists of the same, by teacher;
    - from a store `teacher_losses` instead, float32 [B, T], NaN where a token has none;
    - `teacher_widths`: how many of the T columns each teacher's rows take, one teacher after the
      other;
    - `teacher_ranges` [B, K S, 2] for K teachers: half-open, in the T columns, (-1, -1) unmapped;
      the ranges of all tokens in one teacher's columns after those in another's;
    - `block` [B]: number of the block;
    - with `chunks`, `chunk` [B, S]: the chunk of each position, that of the last token for padding;
    - `mapped_tokens`, `unmapped_tokens`: for each row the label tokens with and without a teacher
      range, as Python integers, so that counts derived from them cost no wait for the device.
    """

    max_length: int
    attend_across_documents: bool = False
    teacher_max_length: int | Sequence[int] | None = None
    chunks: int | None = None

    def __call__(self, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make the batch of some blocks."""
        widths = self._widths(blocks)
        ids = [block["student_ids"] for block in blocks]
        batch = self._rows("", ids, self.max_length)
        batch["segment_edges"], batch["longest_segment"] = self._segments(ids, self.max_length)
        if any(len(losses) for block in blocks for losses in block["teacher_losses"]):
            losses = [_losses(block, widths) for block in blocks]
            batch["teacher_losses"] = torch.from_numpy(np.stack(losses))
        else:
            by_block = [_by_teacher(block, "teacher_ids", len(widths)) for block in blocks]
            rows = list(zip(zip(*by_block, strict=True), widths, strict=True))
            parts = [self._rows("teacher_", *row) for row in rows]
            batch |= {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
            found = [self._segments(*row) for row in rows]
            batch["teacher_segment_edges"] = [segments.edges for segments in found]
            batch["teacher_longest_segment"] = [segments.longest for segments in found]
        batch["teacher_widths"] = widths
        if self.chunks is not None:
            chunks = [_chunk_row(block, self.chunks, self.max_length) for block in blocks]
            batch["chunk"] = torch.from_numpy(np.stack(chunks))
        ranges = np.stack([self._ranges(block, widths) for block in blocks])
        has_label = batch["labels"].numpy() != IGNORED_LABEL
        by_teacher = ranges.reshape(len(blocks), -1, self.max_length, 2)
        mapped = has_label & (by_teacher[..., 0] != UNMAPPED).all(1)
        batch["teacher_ranges"] = torch.from_numpy(ranges)
        batch["block"] = torch.tensor([block["block"] for block in blocks])
        batch["mapped_tokens"] = mapped.sum(-1).tolist()
        batch["unmapped_tokens"] = (has_label & ~mapped).sum(-1).tolist()
        return batch

    def _widths(self, blocks: Sequence[dict[str, Any]]) -> list[int]:
        """Columns of each teacher; a run without one has a single row, of no token."""
        tokens = np.array([_counts(block).sum(0) for block in blocks])
        longest = tokens.max(0).tolist() or [0]
        if self.teacher_max_length is None or not tokens.shape[1]:  # without limits, or teachers
            return [padded_width(width, sys.maxsize) for width in longest]
        pairs = list(zip(longest, limits_of_teachers(self.teacher_max_length), strict=True))
        assert all(a <= b for a, b in pairs), "packed for a longer row of a teacher"
        return [padded_width(*pair) for pair in pairs]

    def _ranges(self, block: dict[str, Any], widths: Sequence[int]) -> IntArray:
        if self.chunks is None:
            return _ranges(block, widths, self.max_length)
        return _chunk_ranges(block, widths, self.chunks, self.max_length)

    def _rows(
        self, prefix: str, blocks: Sequence[Sequence[IntArray]], length: int
    ) -> dict[str, Any]:
        """Ids, labels and positions of some blocks, under the names that models know."""
        rows = zip(*(self._row(segments, length) for segments in blocks), strict=True)
        return {
            prefix + name: torch.from_numpy(np.stack(arrays))
            for name, arrays in zip(_ROW_KEYS, rows, strict=True)
        }

    def _segments(self, blocks: Sequence[Sequence[IntArray]], length: int) -> RowSegments:
        """What attends to itself in the rows of some blocks; padding does, in pieces."""
        rows = [[len(segment) for segment in segments] for segments in blocks]
        if self.attend_across_documents:
            return segments_of(length for _ in blocks)
        longest = max(max(row, default=0) for row in rows)  # not to be the padding's
        return segments_of(n for row in rows for n in (*row, *_pieces(length - sum(row), longest)))

    def _row(self, segments: Sequence[IntArray], length: int) -> tuple[IntArray, ...]:
        ids, labels, positions = (np.zeros(length, np.int64) for _ in _ROW_KEYS)
        labels[:] = IGNORED_LABEL
        at = 0
        for segment in segments:
            here = slice(at, at + len(segment))
            ids[here] = labels[here] = segment
            labels[at : at + 1] = IGNORED_LABEL
            positions[here] = np.arange(len(segment))
            at += len(segment)
        if self.attend_across_documents:
            positions = np.arange(length)
        return ids, labels, positions


_ROW_KEYS = ("input_ids", "labels", "position_ids")


def _pieces(tokens: int, longest: int) -> list[int]:
    """Cut tokens into pieces of a length, where there is one, and what is left.

    >>> _pieces(7, 3), _pieces(7, 0)
    ([3, 3, 1], [7])
    """
    whole = tokens // longest if longest else 0
    return [longest] * whole + [tokens - longest * whole]


def _counts(block: dict[str, Any]) -> IntArray:
    """Tokens of each teacher in each segment, [segments, K]."""
    return np.asarray(block["teacher_counts"], np.int64).reshape(len(block["student_ids"]), -1)


def _by_teacher(block: dict[str, Any], column: str, teachers: int) -> list[list[Any]]:
    """What each teacher has of every segment of a block, by teacher."""
    counts = _counts(block)
    parts = [
        np.split(values, np.cumsum(row)[:-1]) if len(row) else [values]
        for values, row in zip(block[column], counts, strict=True)
    ]
    return [[part[teacher] for part in parts] for teacher in range(teachers)]


def _losses(block: dict[str, Any], widths: Sequence[int]) -> FloatArray:
    row = np.full(sum(widths), np.nan, np.float32)
    at = 0
    parts = _by_teacher(block, "teacher_losses", len(widths))
    for segments, width in zip(parts, widths, strict=True):
        losses = np.concatenate(segments)
        row[at : at + len(losses)] = losses
        at += width
    return row


def _ranges(block: dict[str, Any], widths: Sequence[int], length: int) -> IntArray:
    """Teacher ranges of a row: those of its segments, moved to where each teacher reads them."""
    ranges = np.full((len(widths), length, 2), UNMAPPED, np.int64)
    counts = _counts(block)
    if not counts.shape[1]:
        return ranges.reshape(-1, 2)
    # Where a segment's tokens begin in a teacher's row, less where they begin in the segment.
    starts = np.cumsum([0, *widths[:-1]]) + np.cumsum(counts, 0) - counts
    shifts = starts - (np.cumsum(counts, 1) - counts)
    at = 0
    for first, last, shift in zip(block["first"], block["last"], shifts, strict=True):
        here = np.stack([first, last], axis=-1).astype(np.int64).reshape(len(widths), -1, 2)
        end = at + here.shape[1]
        ranges[:, at:end] = np.where(here == UNMAPPED, UNMAPPED, here + shift[:, None, None])
        at = end
    return ranges.reshape(-1, 2)


def _chunk_row(block: dict[str, Any], chunks: int, length: int) -> IntArray:
    """The chunk of every position of a row."""
    tokens = sum(map(len, block["student_ids"]))
    edges = chunk_edges(tokens, chunks)
    positions = np.arange(length).clip(max=tokens - 1)
    chunk: IntArray = edges.searchsorted(positions, side="right") - 1
    return chunk


def _chunk_ranges(
    block: dict[str, Any], widths: Sequence[int], chunks: int, length: int
) -> IntArray:
    """Teacher ranges of a row whose tokens are guided by the chunk of the same number."""
    ranges = np.full((len(widths), length, 2), UNMAPPED, np.int64)
    tokens, chunk = sum(map(len, block["student_ids"])), _chunk_row(block, chunks, length)
    at = 0
    for mine, counts, width in zip(ranges, _counts(block).T, widths, strict=False):
        edges = chunk_edges(int(counts.sum()), chunks)
        starts = np.cumsum(counts) - counts  # the first token of a segment has no loss
        losses = np.diff(edges - starts.searchsorted(edges))
        by_chunk = np.where(
            losses[:, None] > 0, at + np.stack([edges[:-1], edges[1:]], -1), UNMAPPED
        )
        mine[:tokens] = by_chunk[chunk[:tokens]]
        at += width
    return ranges.reshape(-1, 2)
