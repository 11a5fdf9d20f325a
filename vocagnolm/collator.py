"""Lay blocks out as the rows of a batch, with teacher ranges relative to the teachers' rows.

Enters: blocks (`vocagnolm.packing`). Leaves: a `Batch`. Knows neither tokenizers nor models.
"""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import get_worker_info

from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED
from vocagnolm.host.options import checked
from vocagnolm.packing import (
    Block,
    FloatArray,
    IntArray,
    chunk_edges,
    limits_of_teachers,
    padded_width,
)
from vocagnolm.row_segments import RowSegments, segments_of

_ArrayT = TypeVar("_ArrayT", IntArray, FloatArray)
_Segments = Sequence[Sequence[IntArray]]  # of every row


class Batch(TypedDict, total=False):
    """B rows, S student and T teacher positions; labels and ranges stand at the token they are of.

    Labels are -100 at padding, where a segment starts, as nothing predicts its first token, and
    outside of the labelled tokens of a conversation.
    """

    input_ids: Tensor  # [B, S]
    labels: Tensor  # [B, S]
    position_ids: Tensor  # [B, S]
    # The same segments as `RowSegments` has them; padding is cut into pieces, none the longest.
    segment_edges: Tensor  # int32
    longest_segment: int
    # A co-resident teacher's rows. Columns of several teachers follow one another; lists have one
    # entry for each.
    teacher_input_ids: Tensor  # [B, T]
    teacher_labels: Tensor  # [B, T]
    teacher_position_ids: Tensor  # [B, T]
    teacher_segment_edges: list[Tensor]
    teacher_longest_segment: list[int]
    teacher_label_tokens: list[int]
    # Read from a store instead; NaN where a token has none.
    teacher_losses: Tensor  # float32 [B, T]
    # Columns that each teacher's rows take; their sum is T.
    teacher_widths: list[int]
    # In the T columns, (-1, -1) unmapped: those of all S tokens by the first teacher, then by the
    # second one.
    teacher_ranges: Tensor  # [B, K S, 2]
    # As `alignment.covered_shares` has them; not with `chunks`.
    teacher_shares: Tensor  # float32 [B, K S, 3]
    block: Tensor  # [B], numbers of the blocks
    # With `chunks` only: the chunk of each position, that of the last token for padding.
    chunk: Tensor  # [B, S]
    # On the host, so that counts cost no wait, and ids beyond a vocabulary no process: the largest
    # id of the student's rows and of each co-resident teacher's, and label tokens of each row.
    largest_ids: list[int]
    mapped_tokens: list[int]
    unmapped_tokens: list[int]


def label_tokens(batch: Batch) -> int:
    """Count the student's tokens that have a label."""
    return sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"])


def student_segments(batch: Batch) -> RowSegments:
    """Return the segments of the student's rows."""
    return RowSegments(batch["segment_edges"], batch["longest_segment"])


def teacher_segments(batch: Batch) -> list[RowSegments]:
    """Return the segments of every co-resident teacher's rows."""
    found = (batch["teacher_segment_edges"], batch["teacher_longest_segment"])
    return [RowSegments(*segments) for segments in zip(*found, strict=True)]


@checked
@dataclass(frozen=True)
class PackedCollator:
    """Lay blocks out as the rows of a batch.

    Position ids restart at every segment, which is how the models of `transformers` know that
    attention must not cross; no attention mask may be passed. Padding is a segment of its own. A
    teacher's rows are padded to a multiple of 64, so that their shapes are few, or to the
    `teacher_max_length` of the blocks: a learned table of positions may end there.

    >>> def segments(*tokens: int) -> list[IntArray]:
    ...     return [np.array(tokens)]
    >>> block: Block = {
    ...     "block": 0, "student_ids": segments(1, 5, 6), "teacher_ids": segments(9, 7),
    ...     "teacher_losses": [np.empty(0, np.float32)], "teacher_counts": segments(2),
    ...     "student_labelled": segments(), "teacher_labelled": segments(),
    ...     "ranges": [np.array([[[-1, -1], [1, 2], [1, 2]]])],
    ...     "shares": [np.array([[[1, 1, 1], [0.5, 1, 1], [0.5, 1, 1]]], np.float32)],
    ... }
    >>> batch = PackedCollator(max_length=4)([block])
    >>> batch["labels"].tolist(), batch["teacher_ranges"].tolist()
    ([[-100, 5, 6, -100]], [[[-1, -1], [1, 2], [1, 2], [-1, -1]]])
    """

    max_length: int
    # Let position ids, and so attention, run through the whole block.
    attend_across_documents: bool = False
    teacher_max_length: int | Sequence[int] | None = None
    # Map every token of chunk c of a row to chunk c of the teacher's row (Section 6.1), instead of
    # to the teacher tokens that cover it.
    chunks: int | None = None

    def __call__(self, blocks: Sequence[Block]) -> Batch:
        """Make the batch of some blocks; other items are a ValueError."""
        if missing := sorted(Block.__annotations__.keys() - blocks[0].keys()):
            lacks = f"an item of the data set lacks {', '.join(missing)}"
            raise ValueError(f"{lacks}: expected the blocks of vocagnolm.packing.Blocks")
        widths = self._widths(blocks)
        student = [block["student_ids"] for block in blocks]
        if (longest := max(sum(map(len, row)) for row in student)) > self.max_length:
            raise ValueError(f"blocks have {longest} tokens, beyond max_length {self.max_length}")
        trained = [_labels(block["student_ids"], block["student_labelled"]) for block in blocks]
        ids, labels, positions = self._rows(student, trained, self.max_length)
        edges, longest = self._segments(student, self.max_length)
        batch: Batch = {}
        if self.chunks is None:
            ranges = np.stack([_ranges(block, widths, self.max_length) for block in blocks])
            row = np.ones((len(widths), self.max_length, 3), np.float32)
            shares = np.stack([_laid_out(block["shares"], row.copy()) for block in blocks])
            batch["teacher_shares"] = torch.from_numpy(shares.reshape(len(blocks), -1, 3))
        else:
            rows = [_chunked(block, widths, self.max_length, self.chunks) for block in blocks]
            chunk, ranges = (np.stack(parts) for parts in zip(*rows, strict=True))
            batch["chunk"] = torch.from_numpy(chunk)
        has_label = labels.numpy() != IGNORED_LABEL
        mapped = has_label & (ranges[..., 0] != UNMAPPED).all(1)
        batch |= {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "segment_edges": edges,
            "longest_segment": longest,
            "teacher_widths": widths,
            "teacher_ranges": torch.from_numpy(ranges.reshape(len(blocks), -1, 2)),
            "largest_ids": [int(ids.max())],
            "block": torch.tensor([block["block"] for block in blocks]),
            "mapped_tokens": mapped.sum(-1).tolist(),
            "unmapped_tokens": (has_label & ~mapped).sum(-1).tolist(),
        }
        if any(len(losses) for block in blocks for losses in block["teacher_losses"]):
            losses = [_losses(block, widths) for block in blocks]
            batch["teacher_losses"] = torch.from_numpy(np.stack(losses))
        else:
            batch.update(self._teacher_rows(blocks, widths))
            parts = torch.split(batch["teacher_input_ids"], widths, -1)
            batch["largest_ids"] += [int(part.max()) for part in parts if part.numel()]
        # Without shared memory that is an error in a worker here, and a wait without end later.
        if get_worker_info() is not None:
            tree_map_only(Tensor, Tensor.share_memory_, batch)
        return batch

    def _widths(self, blocks: Sequence[Block]) -> list[int]:
        """Return the columns of each teacher; without one, a single row of no token."""
        tokens = np.array([_counts(block).sum(0) for block in blocks])
        longest = tokens.max(0).tolist() or [0]
        if self.teacher_max_length is None or not tokens.shape[1]:
            return [padded_width(width, sys.maxsize) for width in longest]
        limits = limits_of_teachers(self.teacher_max_length)
        if any(width > limit for width, limit in zip(longest, limits, strict=True)):
            raise ValueError(
                f"blocks have {longest} teacher tokens, beyond a teacher_max_length of {limits}: "
                "give the collator the one that they were packed for"
            )
        return list(map(padded_width, longest, limits))

    def _teacher_rows(self, blocks: Sequence[Block], widths: Sequence[int]) -> Batch:
        ids = [_by_teacher(b, b["teacher_ids"], len(widths)) for b in blocks]
        trained = [_labels(b["teacher_ids"], b["teacher_labelled"]) for b in blocks]
        labels = [_by_teacher(*pair, len(widths)) for pair in zip(blocks, trained, strict=True)]
        columns = (zip(*column, strict=True) for column in (ids, labels))
        teachers = list(zip(*columns, widths, strict=True))
        rows = [self._rows(*teacher) for teacher in teachers]
        ids_BT, labels_BT, positions_BT = (torch.cat(x, -1) for x in zip(*rows, strict=True))
        segments = [self._segments(segments, width) for segments, _, width in teachers]
        return {
            "teacher_input_ids": ids_BT,
            "teacher_labels": labels_BT,
            "teacher_position_ids": positions_BT,
            "teacher_segment_edges": [found.edges for found in segments],
            "teacher_longest_segment": [found.longest for found in segments],
            "teacher_label_tokens": [int((labels != IGNORED_LABEL).sum()) for _, labels, _ in rows],
        }

    def _rows(self, blocks: _Segments, trained: _Segments, length: int) -> Sequence[Tensor]:
        """Return ids, labels and positions [B, length]."""
        ids, labels, positions = (np.zeros((len(blocks), length), np.int64) for _ in range(3))
        labels[:] = IGNORED_LABEL
        # ids        1   5 6 2   1   7   0   0       two segments, and padding
        # labels    -100 5 6 2 -100  7 -100 -100
        # positions  0   1 2 3   0   1   0   0
        for row, segments in enumerate(zip(blocks, trained, strict=True)):
            at = 0
            for segment, its_labels in zip(*segments, strict=True):
                here = slice(at, at + len(segment))
                ids[row, here], labels[row, here] = segment, its_labels
                labels[row, at : at + 1] = IGNORED_LABEL
                positions[row, here] = np.arange(len(segment))
                at += len(segment)
        if self.attend_across_documents:
            positions[:] = np.arange(length)
        return [torch.from_numpy(rows) for rows in (ids, labels, positions)]

    def _segments(self, blocks: _Segments, length: int) -> RowSegments:
        """Return what attends to itself in the rows of some blocks; padding does, in pieces."""
        if self.attend_across_documents:
            return segments_of(length for _ in blocks)
        rows = [[len(segment) for segment in segments] for segments in blocks]
        # Padding must not be the longest, or the kernel would be called for more than it needs.
        longest = max(max(row, default=0) for row in rows) or length
        for row in rows:
            whole, rest = divmod(length - sum(row), longest or 1)
            row += [longest] * whole + [rest]
        return segments_of(itertools.chain(*rows))


def _labels(segments: Sequence[IntArray], labelled: Sequence[IntArray]) -> list[IntArray]:
    """Return the labels of segments: all ids, or those in ranges [first, last) laid end to end.

    >>> _labels([np.array([7, 8, 9]), np.array([5, 6])], [np.array([1, 2]), np.array([])])
    [array([-100,    8, -100]), array([5, 6])]
    """
    labels = []
    for ids, ranges in zip(segments, labelled, strict=True):
        if not len(ranges):
            labels.append(ids)
            continue
        # Ids may have a type without negative numbers.
        kept = np.full(len(ids), IGNORED_LABEL, np.int64)
        for first, last in np.asarray(ranges, np.int64).reshape(-1, 2):
            kept[first:last] = ids[first:last]
        labels.append(kept)
    return labels


def _counts(block: Block) -> IntArray:
    """Return the tokens of each teacher in each segment, [segments, K]."""
    return np.asarray(block["teacher_counts"], np.int64).reshape(len(block["student_ids"]), -1)


def _by_teacher(block: Block, column: Sequence[_ArrayT], teachers: int) -> list[list[_ArrayT]]:
    """Part a column of the block's segments by teacher: [teachers][segments]."""
    parts: list[list[_ArrayT]] = []
    for values, counts in zip(column, _counts(block), strict=True):
        # Without a teacher there is one empty part.
        parts.append(np.split(values, np.cumsum(counts)[:-1]) if len(counts) else [values])
    return [[part[teacher] for part in parts] for teacher in range(teachers)]


def _losses(block: Block, widths: Sequence[int]) -> FloatArray:
    """Return the stored losses of a row [T], NaN at padding."""
    row = np.full(sum(widths), np.nan, np.float32)
    at = 0
    by_teacher = _by_teacher(block, block["teacher_losses"], len(widths))
    for segments, width in zip(by_teacher, widths, strict=True):
        losses = np.concatenate(segments)
        row[at : at + len(losses)] = losses
        at += width
    return row


def _ranges(block: Block, widths: Sequence[int], length: int) -> IntArray:
    """Return the teacher ranges of a row, [K, S, 2]: its segments', moved to the columns."""
    ranges = np.full((len(widths), length, 2), UNMAPPED, np.int64)
    # A segment counts a teacher's tokens from 0; in the columns each teacher has a row of its own.
    # Two segments of two teachers, a and b, and widths of 8 and 8:
    #
    #   counts  [[3, 2], [4, 1]]        segment 0   a a a   b b
    #                                   segment 1   A A A A   B
    #   columns   a a a A A A A . | b b B . . . . .
    #   starts    0     3           8   10          where they begin in the columns
    counts = _counts(block)
    starts = np.cumsum([0, *widths[:-1]])[: counts.shape[1]] + np.cumsum(counts, 0) - counts
    moved = [
        np.where(here == UNMAPPED, UNMAPPED, here + start[:, None, None])
        for here, start in zip(block["ranges"], starts, strict=True)
    ]
    return _laid_out(moved, ranges)


def _laid_out(segments: Sequence[_ArrayT], row: _ArrayT) -> _ArrayT:
    """Write what segments have, [teachers, tokens, n], into a row, which ends with padding."""
    content = np.concatenate(segments, 1)
    row[: len(content), : content.shape[1]] = content
    return row


def _chunked(
    block: Block, widths: Sequence[int], length: int, chunks: int
) -> tuple[IntArray, IntArray]:
    """Return the chunk of every position of a row [S], and the ranges [K, S, 2] of chunks."""
    tokens = sum(map(len, block["student_ids"]))
    positions = np.arange(length).clip(max=tokens - 1)
    chunk = chunk_edges(tokens, chunks).searchsorted(positions, side="right") - 1
    ranges = np.full((len(widths), length, 2), UNMAPPED, np.int64)
    starts = np.cumsum([0, *widths])
    for mine, counts, start in zip(ranges, _counts(block).T, starts, strict=False):
        edges = chunk_edges(int(counts.sum()), chunks)
        # The first token of a segment has no loss; a chunk of such tokens only guides nothing.
        losses = np.diff(edges - (np.cumsum(counts) - counts).searchsorted(edges))
        chunk_ranges = start + np.stack([edges[:-1], edges[1:]], -1)
        chunk_ranges[losses <= 0] = UNMAPPED
        mine[:tokens] = chunk_ranges[chunk[:tokens]]
    return chunk, ranges
