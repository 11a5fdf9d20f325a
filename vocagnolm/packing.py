"""Pack segments into sequences of `max_length` student tokens.

The input is aligned segments (`vocagnolm.data`). The output is a map-style dataset of packed
sequences, so that a run resumes by an index, and `vocagnolm.collator` makes batches of them. The
module knows neither tokenizers nor models.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from vocagnolm.alignment import align_segment
from vocagnolm.conventions import IntArray

if TYPE_CHECKING:
    import datasets

FloatArray = npt.NDArray[np.float32]


class Block(TypedDict, total=False):
    """One packed sequence: its index, and one array for each of its segments.

    The columns are those of `vocagnolm.data.Segments`. The teachers' are there only if there is a
    teacher. The ranges are those that `align_segment` returns.
    """

    block: int
    student_ids: Sequence[IntArray]
    student_labelled: Sequence[IntArray]
    teacher_ids: Sequence[IntArray]
    teacher_losses: Sequence[FloatArray]
    teacher_counts: Sequence[IntArray]
    teacher_labelled: Sequence[IntArray]
    ranges: Sequence[IntArray]
    # Read again for the shares of characters only.
    student_codes: Sequence[IntArray]
    student_exceptions: Sequence[IntArray]
    teacher_codes: Sequence[IntArray]
    teacher_exceptions: Sequence[IntArray]


class LateLosses:
    """Losses of the teacher that are not known as sequences are packed, and here never will be.

    The column `teacher_losses` then holds the place of each token among the tokens of its document,
    NaN where the token has no loss. A sequence that is evaluated needs no losses.
    """

    def expect(self, blocks: Sequence[int]) -> None:
        """Learn which sequences are read next, in their order."""

    def fill(self, block: int, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a sequence with losses in place of places."""
        unknown = [np.full(len(row), np.nan, np.float32) for row in columns["teacher_losses"]]
        return columns | {"teacher_losses": unknown}


def segment_rows(block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn the columns of a packed sequence into a row for each of its segments."""
    # The index belongs to the sequence as a whole. Every other entry has a value for each segment.
    names = [name for name in block if name != "block"]
    rows = []
    for values in zip(*map(block.__getitem__, names), strict=True):
        rows.append(dict(zip(names, values, strict=True)))
    return rows


def as_block(index: int, columns: Mapping[str, Sequence[Any]]) -> Block:
    """Make a packed sequence of segments, columns of `data.Segments.rows`, and align them."""
    names = [name for name in columns if name in Block.__annotations__]
    block: dict[str, Any] = {name: columns[name] for name in names}
    if "teacher_counts" in block:
        block["ranges"] = [align_segment(row) for row in segment_rows(block)]
    block["block"] = index
    return cast(Block, block)


def teacher_limits(teacher_max_length: int | Sequence[int], teachers: int) -> list[int]:
    """Return the limit of each teacher's tokens in a sequence.

    Raises:
        ValueError: there are several teachers and a single limit, or one too few.
    """
    limits: list[int] = np.atleast_1d(teacher_max_length).tolist()
    if len(limits) < teachers:
        raise ValueError(
            f"teacher_max_length must have a limit for each of {teachers} teachers, got {limits}"
        )
    # Without a teacher a limit has nothing to be compared with.
    return limits[:teachers]


def pack(
    student_tokens: Sequence[int] | IntArray,
    teacher_tokens: Sequence[int] | IntArray,
    max_length: int,
    teacher_max_length: int | Sequence[int],
) -> list[list[int]]:
    """Fill sequences with whole segments: longest first, each into the fullest one with room.

    One count stands for all limits, so that the first sequence found has room for all models: a
    segment needs, and a sequence has left, what the tightest limit says, in student tokens.

    Takes the tokens of N segments, [N] and [N] (or [N, K] for K teachers), none beyond its limit;
    gives the segments of each sequence, in order. O(N log N), and N operations on a bit set.

    >>> pack([5, 3, 2, 4], [5, 3, 2, 4], max_length=7, teacher_max_length=99)
    [[0, 2], [1, 3]]
    """
    # A segment has a row, and a model has a column: the student first, and then the teachers.
    sizes = np.column_stack((student_tokens, teacher_tokens)).astype(np.int64)
    limits = [max_length]
    limits += teacher_limits(teacher_max_length, sizes.shape[1] - 1)
    if (sizes > limits).any():
        raise ValueError(
            f"segments have up to {sizes.max(0).tolist()} tokens, beyond {limits}: align and pack "
            "for the same limits"
        )
    # What a segment needs is rounded up, and below what a sequence has left is rounded down. So
    # need <= room implies that every model's tokens fit, whatever the two roundings lose.
    needs = np.zeros(len(sizes), np.int64)
    for size, limit in zip(sizes.T, limits, strict=True):
        np.maximum(needs, -(-size * max_length // limit), out=needs)
    blocks: list[list[int]] = []
    # Tokens that each sequence has left for each model.
    remaining: list[list[int]] = []
    # For each room, the sequences that have it; bit r of `rooms` is set where there are any.
    open_blocks: list[list[int]] = [[] for _ in range(max_length + 1)]
    rooms = 0
    # A stable order makes the packing the same on every machine, which resuming relies on.
    for segment in np.argsort(-needs, kind="stable").tolist():
        need = int(needs[segment])
        # The bits of rooms of at least `need`. The lowest of them is the fullest sequence's.
        fitting = rooms >> need << need
        if fitting:
            # x & -x keeps the lowest bit that is set.
            room = (fitting & -fitting).bit_length() - 1
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms &= ~(1 << room)
        else:
            block = len(blocks)
            blocks.append([])
            remaining.append(limits)
        blocks[block].append(segment)
        # New sequences share the list of limits, so it is replaced and never changed in place.
        free_tokens = list(map(operator.sub, remaining[block], sizes[segment].tolist()))
        remaining[block] = free_tokens
        # The tightest model decides, in student tokens, and the sequence moves to its new room.
        room = max_length
        for tokens, limit in zip(free_tokens, limits, strict=True):
            room = min(room, tokens * max_length // limit)
        open_blocks[room].append(block)
        rooms |= 1 << room
    # A sequence keeps the order of the corpus, not the order by size in which it was filled.
    return [sorted(block) for block in blocks]


def padded_width(longest: int, limit: int) -> int:
    """Return the columns of a teacher's rows: few different widths, and none beyond its context.

    >>> padded_width(65, 4096), padded_width(65, 100)
    (128, 100)
    """
    return min(-(-longest // 64) * 64, limit)


class Blocks(Dataset[Block]):
    """Packed sequences of the rows of `vocagnolm.data.Segments`; `blocks[i]` reads its own only.

    A sequence holds at most `max_length` tokens of the student, and `teacher_max_length` of each
    teacher. The rows may be those of several corpora, one after the other, which are packed apart.
    The argument `parts` then says how many rows each corpus has, by its name, and the attribute
    `parts` how many sequences.
    """

    def __init__(
        self,
        segments: datasets.Dataset,
        max_length: int,
        teacher_max_length: int | Sequence[int],
        parts: Mapping[str, int] | None = None,
    ):
        # Comes with `datasets`, without which a trainer can be given sequences of another kind.
        import pyarrow.compute as pc

        tokens = np.asarray(segments.with_format("numpy")["student_tokens"][:], np.int64)
        by_teacher = np.empty((len(tokens), 0), np.int64)
        if len(tokens) and "teacher_counts" in segments.column_names:
            # Every row lists K counts. Flattened by Arrow they make no Python object for each.
            counts = pc.list_flatten(segments.with_format("arrow")["teacher_counts"][:])
            by_teacher = np.asarray(counts, np.int64).reshape(len(tokens), -1)
        # `order` lists the segments of all sequences, and `sequence_sizes` says how many of them
        # each sequence has.
        order = []
        sequence_sizes: list[int] = []
        self.parts: dict[str, int] = {}
        first = 0
        for name, size in (parts or {"": len(segments)}).items():
            part = slice(first, first + size)
            sequences = pack(tokens[part], by_teacher[part], max_length, teacher_max_length)
            # `pack` numbers the segments of a corpus from 0; the rows are those of all corpora.
            local_order = list(itertools.chain.from_iterable(sequences))
            order.append(first + np.array(local_order, np.int64))
            sequence_sizes += map(len, sequences)
            self.parts[name] = len(sequences)
            first += size
        self.max_length = max_length
        self.teacher_max_length = teacher_max_length
        # Shares in which the parts are drawn; None draws all sequences once.
        self.weights: Sequence[float] | None = None
        # Names each corpus in the settings of a run, once who aligned it has set it.
        self.corpus_digest: list[str] | None = None
        # Where the losses come from that a sequence lacks until it is read.
        self.late: LateLosses | None = None
        self.student_tokens = int(tokens.sum())
        # Sequence b holds the segments order[edges[b] : edges[b + 1]].
        self._order: IntArray = np.concatenate(order)
        self._edges = np.append(0, np.cumsum(sequence_sizes, dtype=np.int64))
        # Tokens of the longest segment, and of the sequences, for the student and each teacher.
        sizes = np.column_stack([tokens, by_teacher])
        rows = sizes
        # `reduceat` sums from each start to the next, and fails where there is no start at all.
        if sequence_sizes:
            rows = np.add.reduceat(sizes[self._order], self._edges[:-1])
        self._longest: list[int] = sizes.max(0, initial=0).tolist()
        self._widest: list[int] = rows.max(0, initial=0).tolist()
        self.teacher_tokens: IntArray = rows[:, 1:].sum(1)
        # The other columns, such as the counts of text tokens, would be read with every row.
        columns = [name for name in segments.column_names if name in Block.__annotations__]
        self._rows = segments.select_columns(columns).with_format("numpy")

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, block: int) -> Block:
        columns = self._rows[self.segments(block)]
        if self.late:
            columns = self.late.fill(block, columns)
        return as_block(block, columns)

    def segments(self, block: int) -> IntArray:
        """Return the segments of a sequence, as rows of `data.Segments`."""
        return self._order[self._edges[block] : self._edges[block + 1]]

    def longest_segments(self, attend_across_documents: bool = False) -> list[int]:
        """Return the tokens of the longest segment that the student, and each teacher, reads."""
        if not attend_across_documents:
            return self._longest
        # A row is then one segment, padding included: the student's rows have `max_length`, and a
        # teacher's the width that `PackedCollator` pads its widest row to.
        lengths = [self.max_length]
        widest = self._widest[1:]
        limits = teacher_limits(self.teacher_max_length, len(widest))
        for width, limit in zip(widest, limits, strict=True):
            lengths.append(padded_width(width, limit))
        return lengths

    @property
    def fill_fraction(self) -> float:
        """The share of the positions that hold a token, in [0, 1]."""
        return self.student_tokens / max(len(self) * self.max_length, 1)
