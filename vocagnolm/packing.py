"""Packs segments into sequences of `max_length` student tokens.

The input is aligned segments (`vocagnolm.data`). The output is a map-style dataset of packed
sequences, so that a run can resume by an index. `vocagnolm.collator` makes batches of them. This
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

    The columns are those of `vocagnolm.data.Segments`. Without a teacher, it lacks its columns.
    The ranges are those that `align_segment` returns.
    """

    block: int
    student_ids: Sequence[IntArray]
    student_labelled: Sequence[IntArray]
    # Only if the corpus brings weights: one for each labelled range, or one, or none for 1.
    student_weights: Sequence[FloatArray]
    teacher_ids: Sequence[IntArray]
    teacher_losses: Sequence[FloatArray]
    teacher_counts: Sequence[IntArray]
    teacher_labelled: Sequence[IntArray]
    ranges: Sequence[IntArray]
    # Read again only for the shares of characters.
    student_codes: Sequence[IntArray]
    student_exceptions: Sequence[IntArray]
    teacher_codes: Sequence[IntArray]
    teacher_exceptions: Sequence[IntArray]


def segment_rows(sequence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn the columns of a packed sequence into one row for each of its segments."""
    # The index belongs to the whole sequence. Every other entry has a value for each segment.
    names = [name for name in sequence if name != "block"]
    rows = []
    for values in zip(*map(sequence.__getitem__, names), strict=True):
        rows.append(dict(zip(names, values, strict=True)))
    return rows


def as_block(index: int, columns: Mapping[str, Sequence[Any]]) -> Block:
    """Make a packed sequence of segments (columns of `data.Segments.rows`), and align them."""
    names = [name for name in columns if name in Block.__annotations__]
    sequence: dict[str, Any] = {name: columns[name] for name in names}
    if "teacher_counts" in sequence:
        sequence["ranges"] = [align_segment(row) for row in segment_rows(sequence)]
    sequence["block"] = index
    return cast(Block, sequence)


def pack(
    student_tokens: Sequence[int] | IntArray,
    teacher_tokens: Sequence[int] | IntArray,
    max_length: int,
    teacher_max_length: int | Sequence[int],
) -> list[list[int]]:
    """Fill sequences with whole segments: longest first, each into the fullest one with room.

    One number stands for all limits, so that the first sequence found has room for all models. What
    a segment needs, and what a sequence has left, is counted in student tokens by the tightest
    limit.

    Takes the tokens of N segments, [N] and [N] (or [N, K] for K teachers), none above its limit.
    Returns the segments of each sequence, in order. O(N log N), plus N operations on a bit set.

    >>> pack([5, 3, 2, 4], [5, 3, 2, 4], max_length=7, teacher_max_length=99)
    [[0, 2], [1, 3]]
    """
    # Each segment has a row, and each model a column: first the student, then the teachers.
    sizes = np.column_stack((student_tokens, teacher_tokens)).astype(np.int64)
    teachers = sizes.shape[1] - 1
    teacher_limits: list[int] = np.atleast_1d(teacher_max_length).tolist()
    # A single limit is that of every teacher.
    if len(teacher_limits) == 1:
        teacher_limits *= teachers
    # Without a teacher, there is nothing to compare a limit with.
    limits = [max_length] + teacher_limits[:teachers]
    if (sizes > limits).any():
        raise ValueError(
            f"segments have up to {sizes.max(0).tolist()} tokens, beyond {limits}: align and pack "
            "for the same limits"
        )
    # What a segment needs is rounded up, and what a sequence has left is rounded down below. So
    # need <= room implies that every model's tokens fit, whatever rounding loses.
    needs = np.zeros(len(sizes), np.int64)
    for size, limit in zip(sizes.T, limits, strict=True):
        np.maximum(needs, -(-size * max_length // limit), out=needs)
    sequences: list[list[int]] = []
    # The tokens that each sequence has left for each model.
    remaining: list[list[int]] = []
    # For each room, the sequences that have it. Bit r of `rooms` is set if there are any.
    open_sequences: list[list[int]] = [[] for _ in range(max_length + 1)]
    rooms = 0
    # A stable order gives the same packing on every machine, which resuming depends on.
    for segment in np.argsort(-needs, kind="stable").tolist():
        need = int(needs[segment])
        # The bits for rooms of at least `need`. The lowest bit belongs to the fullest sequence.
        fitting = rooms >> need << need
        if fitting:
            # x & -x keeps only the lowest bit that is set.
            room = (fitting & -fitting).bit_length() - 1
            sequence = open_sequences[room].pop()
            if not open_sequences[room]:
                rooms &= ~(1 << room)
        else:
            sequence = len(sequences)
            sequences.append([])
            remaining.append(limits)
        sequences[sequence].append(segment)
        # New sequences share this list of limits, so it is replaced and never changed in place.
        free_tokens = list(map(operator.sub, remaining[sequence], sizes[segment].tolist()))
        remaining[sequence] = free_tokens
        # The tightest model decides, in student tokens, and the sequence moves to its new room.
        room = max_length
        for tokens, limit in zip(free_tokens, limits, strict=True):
            room = min(room, tokens * max_length // limit)
        open_sequences[room].append(sequence)
        rooms |= 1 << room
    # A sequence keeps the corpus's order, not the order by size in which it was filled.
    return [sorted(sequence) for sequence in sequences]


class Blocks(Dataset[Block]):
    """Packed sequences of the rows of `vocagnolm.data.Segments`. `blocks[i]` reads only its own.

    A sequence has at most `max_length` student tokens, and at most `teacher_max_length` tokens of
    each teacher. The rows may be those of several corpora, one after the other, which are packed
    separately. Then the argument `parts` gives the number of rows of each corpus by name, and the
    attribute `parts` the number of sequences.
    """

    def __init__(
        self,
        segments: datasets.Dataset,
        max_length: int,
        teacher_max_length: int | Sequence[int],
        parts: Mapping[str, int] | None = None,
    ):
        # `datasets` is needed only here. A trainer can also get other sequences.
        import pyarrow.compute as pc

        tokens = np.asarray(segments.with_format("numpy")["student_tokens"][:], np.int64)
        by_teacher = np.empty((len(tokens), 0), np.int64)
        if len(tokens) and "teacher_counts" in segments.column_names:
            # Every row has a list of K counts. Flattening them in Arrow makes no Python object for
            # each.
            counts = pc.list_flatten(segments.with_format("arrow")["teacher_counts"][:])
            by_teacher = np.asarray(counts, np.int64).reshape(len(tokens), -1)
        # `order` lists the segments of all sequences, and `sequence_sizes` says how many each has.
        order = []
        sequence_sizes: list[int] = []
        self.parts: dict[str, int] = {}
        first = 0
        for name, size in (parts or {"": len(segments)}).items():
            part = slice(first, first + size)
            sequences = pack(tokens[part], by_teacher[part], max_length, teacher_max_length)
            # `pack` numbers the segments of a corpus from 0, but the rows are those of all corpora.
            local_order = list(itertools.chain.from_iterable(sequences))
            order.append(first + np.array(local_order, np.int64))
            sequence_sizes += map(len, sequences)
            self.parts[name] = len(sequences)
            first += size
        self.max_length = max_length
        self.teacher_max_length = teacher_max_length
        # The shares in which the parts are drawn. None draws every sequence once.
        self.weights: Sequence[float] | None = None
        # Identifies each corpus in a run's settings. It is set after the alignment.
        self.corpus_digest: list[str] | None = None
        # The hashes of the tokenizers of the student and of each teacher, where they are known.
        self.tokenizers_sha256: list[str] | None = None
        # The options with which texts were read, where they are known.
        self.read_with: dict[str, Any] = {}
        self.student_tokens = int(tokens.sum())
        # Sequence b has the segments order[edges[b] : edges[b + 1]].
        self._order: IntArray = np.concatenate(order)
        self._edges = np.append(0, np.cumsum(sequence_sizes, dtype=np.int64))
        # The tokens of the longest segment, for the student and each teacher.
        sizes = np.column_stack([tokens, by_teacher])
        rows = sizes
        # `reduceat` sums from each start to the next, and fails if there is no start at all.
        if sequence_sizes:
            rows = np.add.reduceat(sizes[self._order], self._edges[:-1])
        self.longest_segments: list[int] = sizes.max(0, initial=0).tolist()
        self.teacher_tokens: IntArray = rows[:, 1:].sum(1)
        # The other columns, such as the counts of text tokens, would be read with every row.
        columns = [name for name in segments.column_names if name in Block.__annotations__]
        self._rows = segments.select_columns(columns).with_format("numpy")

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, sequence: int) -> Block:
        return as_block(sequence, self._rows[self.segments(sequence)])

    def segments(self, sequence: int) -> IntArray:
        """Return the segments of a sequence, as rows of `data.Segments`."""
        return self._order[self._edges[sequence] : self._edges[sequence + 1]]

    @property
    def segment_count(self) -> int:
        """The number of segments in all sequences."""
        return len(self._order)

    @property
    def fill_fraction(self) -> float:
        """The share of positions that have a token, in [0, 1]."""
        return self.student_tokens / max(len(self) * self.max_length, 1)
