"""From segments to training batches: blocks of `max_length` student tokens, and the collator.

Enters: aligned segments (`vocagnolm.data`). Leaves: a map-style dataset of blocks, so that resuming
is an index, and batches whose teacher ranges are relative to the teacher's row. Knows neither
tokenizers nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from vocagnolm.alignment import UNMAPPED
from vocagnolm.token_loss import IGNORED_LABEL

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def pack(
    student_tokens: Sequence[int] | IntArray,
    teacher_tokens: Sequence[int] | IntArray,
    max_length: int,
    teacher_max_length: int,
) -> list[list[int]]:
    """Fill blocks with whole segments: longest first, each into the fullest block that has room.

    One number stands for both limits, so that the first block found has room in both: a segment
    needs, and a block has left, what the tighter of its two limits says, in student tokens. Where
    the teacher's row is tight, that fills more than asking for both rooms one after the other.

    Args:
        student_tokens: student tokens of each segment, each at most `max_length`.
        teacher_tokens: teacher tokens of each segment, each at most `teacher_max_length`.
        max_length: room of a block, in student tokens.
        teacher_max_length: room of a block, in teacher tokens (the teacher's context).

    Returns:
        The segment numbers of each block, in the order of the segments. O(N log N) for N segments,
        besides N operations on a bit set of `max_length` bits.

    >>> pack([5, 3, 2, 4], [5, 3, 2, 4], max_length=7, teacher_max_length=99)
    [[0, 2], [1, 3]]
    """
    ours, theirs = np.asarray(student_tokens, np.int64), np.asarray(teacher_tokens, np.int64)
    needs = np.maximum(ours, -(-theirs * max_length // teacher_max_length))  # rounded up
    blocks: list[list[int]] = []
    student_room: list[int] = []
    teacher_room: list[int] = []
    open_blocks: list[list[int]] = [[] for _ in range(max_length + 1)]  # by room left
    rooms = 0  # bit r is set where a block with room r is open
    for segment in np.argsort(-needs, kind="stable").tolist():
        need = int(needs[segment])
        fitting = rooms >> need << need
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms &= ~(1 << room)
        else:
            block = len(blocks)
            blocks.append([])
            student_room.append(max_length)
            teacher_room.append(teacher_max_length)
        blocks[block].append(segment)
        student_room[block] -= int(ours[segment])
        teacher_room[block] -= int(theirs[segment])
        room = min(student_room[block], teacher_room[block] * max_length // teacher_max_length)
        open_blocks[room].append(block)
        rooms |= 1 << room
    return [sorted(block) for block in blocks]


class Blocks(Dataset[dict[str, Any]]):
    """Blocks of segments, by number; `blocks[i]` reads only its own rows.

    Args:
        segments: rows of `vocagnolm.data.Segments`.
        max_length: student tokens of a block.
        teacher_max_length: teacher tokens that one row of the teacher may hold.
    """

    def __init__(self, segments: datasets.Dataset, max_length: int, teacher_max_length: int):
        lengths = segments.with_format("numpy")
        packed = pack(
            lengths["student_tokens"][:],
            lengths["teacher_tokens"][:],
            max_length,
            teacher_max_length,
        )
        self.max_length = max_length
        self.student_tokens = int(np.sum(lengths["student_tokens"][:]))
        self._order = np.array([segment for block in packed for segment in block], dtype=np.int64)
        self._ends = np.cumsum([len(block) for block in packed])
        columns = ["student_ids", "teacher_ids", "teacher_losses", "first", "last"]
        self._rows = segments.select_columns(columns).with_format("numpy")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, block: int) -> dict[str, Any]:
        return {"block": block, **self._rows[self.segments(block)]}

    def segments(self, block: int) -> IntArray:
        """The numbers of a block's segments."""
        start = self._ends[block - 1] if block else 0
        numbers: IntArray = self._order[start : self._ends[block]]
        return numbers

    @property
    def fill_fraction(self) -> float:
        """Share of the positions that hold a token, in [0, 1]."""
        return self.student_tokens / max(len(self) * self.max_length, 1)


@dataclass(frozen=True)
class PackedCollator:
    """Lay blocks out as the rows of a batch.

    Position ids restart at every segment, which is how the models of `transformers` know that
    attention must not cross; no attention mask may be passed. Padding is a segment of its own.
    The teacher's rows are padded to the next multiple of 64 after the longest one, so that their
    shapes are few.

    Attributes:
        max_length: S, student positions of a row.
        attend_across_documents: let position ids, and so attention, run through the whole block.
        teacher_max_length: the most teacher positions of a row, where padding ends; give what the
            blocks were packed with. Without it padding may exceed a context that is no multiple
            of 64, and so a learned table of positions.

    A batch holds (B rows, S student and T teacher positions, every label and range indexed by the
    token it belongs to):

    - `input_ids`, `labels`, `position_ids` [B, S]: labels are -100 at padding and where a segment
      starts, as nothing predicts its first token;
    - `teacher_input_ids`, `teacher_labels`, `teacher_position_ids` [B, T];
    - from a store `teacher_losses` instead, float32 [B, T], NaN where a token has none;
    - `teacher_ranges` [B, S, 2]: half-open, in positions of the teacher's row, (-1, -1) unmapped;
      with K stores [B, K S, 2], the ranges of all tokens in one after those in another;
    - `block` [B]: number of the block;
    - `mapped_tokens`, `unmapped_tokens`: for each row the label tokens with and without a teacher
      range, as Python integers, so that counts derived from them cost no wait for the device.
    """

    max_length: int
    attend_across_documents: bool = False
    teacher_max_length: int | None = None

    def __call__(self, blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make the batch of some blocks."""
        longest = max(sum(_teacher_tokens(block)) for block in blocks)
        teacher_length = -(-longest // 64) * 64
        if self.teacher_max_length is not None:
            assert longest <= self.teacher_max_length, "packed for a longer row of the teacher"
            teacher_length = min(teacher_length, self.teacher_max_length)
        batch = self._rows("", [block["student_ids"] for block in blocks], self.max_length)
        if any(len(losses) for block in blocks for losses in block["teacher_losses"]):
            rows = [_row_losses(block["teacher_losses"], teacher_length) for block in blocks]
            batch["teacher_losses"] = torch.from_numpy(np.stack(rows))
        else:
            ids = [block["teacher_ids"] for block in blocks]
            batch |= self._rows("teacher_", ids, teacher_length)
        ranges = np.stack([_row_ranges(block, self.max_length) for block in blocks])
        has_label = batch["labels"].numpy() != IGNORED_LABEL
        by_teacher = ranges.reshape(len(blocks), -1, self.max_length, 2)
        mapped = has_label & (by_teacher[..., 0] != UNMAPPED).all(1)
        batch["teacher_ranges"] = torch.from_numpy(ranges)
        batch["block"] = torch.tensor([block["block"] for block in blocks])
        batch["mapped_tokens"] = mapped.sum(-1).tolist()
        batch["unmapped_tokens"] = (has_label & ~mapped).sum(-1).tolist()
        return batch

    def _rows(
        self, prefix: str, blocks: Sequence[Sequence[IntArray]], length: int
    ) -> dict[str, Any]:
        """Ids, labels and positions of some blocks, under the names that models know."""
        rows = zip(*(self._row(segments, length) for segments in blocks), strict=True)
        return {
            prefix + name: torch.from_numpy(np.stack(arrays))
            for name, arrays in zip(_ROW_KEYS, rows, strict=True)
        }

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


def _teacher_tokens(block: dict[str, Any]) -> list[int]:
    """Teacher tokens of each segment, which have ids or, from a store, losses."""
    return [
        len(ids) or len(losses)
        for ids, losses in zip(block["teacher_ids"], block["teacher_losses"], strict=True)
    ]


def _row_losses(segments: Sequence[FloatArray], length: int) -> FloatArray:
    row = np.full(length, np.nan, np.float32)
    losses = np.concatenate(segments)
    row[: len(losses)] = losses
    return row


def _row_ranges(block: dict[str, Any], length: int) -> IntArray:
    """Teacher ranges of a row: those of its segments, moved to where the teacher reads them."""
    teachers = len(block["first"][0]) // len(block["student_ids"][0])
    ranges = np.full((teachers, length, 2), UNMAPPED, np.int64)
    at = teacher_at = 0
    for first, last, teacher_tokens in zip(
        block["first"], block["last"], _teacher_tokens(block), strict=True
    ):
        here = np.stack([first, last], axis=-1).astype(np.int64).reshape(teachers, -1, 2)
        end = at + here.shape[1]
        ranges[:, at:end] = np.where(here == UNMAPPED, UNMAPPED, here + teacher_at)
        at, teacher_at = end, teacher_at + teacher_tokens
    return ranges.reshape(-1, 2)
