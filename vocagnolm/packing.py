"""Pack segments into blocks of `max_length` student tokens.

Enters: aligned segments (`vocagnolm.data`). Leaves: a map-style dataset of blocks, so that resuming
is an index. Knows neither tokenizers nor models.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from vocagnolm.alignment import align_segment

if TYPE_CHECKING:
    import datasets

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Block(TypedDict):
    """One item of `Blocks`: its number, and one array for each of its segments.

    Columns are those of `vocagnolm.data.Segments`; ranges and shares of `align_segment`.
    """

    block: int
    student_ids: Sequence[IntArray]
    teacher_ids: Sequence[IntArray]
    teacher_losses: Sequence[FloatArray]
    teacher_counts: Sequence[IntArray]
    student_labelled: Sequence[IntArray]
    teacher_labelled: Sequence[IntArray]
    ranges: Sequence[IntArray]
    shares: Sequence[FloatArray]


_COLUMNS = [
    *("student_ids", "teacher_ids", "teacher_losses", "teacher_counts"),
    *("student_labelled", "teacher_labelled"),
]
_SPANS = ["student_steps", "student_jumps", "teacher_steps", "teacher_jumps"]


def as_block(number: int, columns: Mapping[str, Sequence[Any]]) -> Block:
    """Make a block of some segments, given the columns of `data.Segments.rows`; align them."""
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    ranges, shares = zip(*map(align_segment, rows), strict=True)
    kept = {name: columns[name] for name in _COLUMNS}
    return cast(Block, {"block": number, **kept, "ranges": ranges, "shares": shares})


def pack(
    student_tokens: Sequence[int] | IntArray,
    teacher_tokens: Sequence[int] | IntArray,
    max_length: int,
    teacher_max_length: int | Sequence[int],
) -> list[list[int]]:
    """Fill blocks with whole segments: longest first, each into the fullest block that has room.

    One number stands for all limits, so that the first block found has room for all models: a
    segment needs, and a block has left, what the tightest of its limits says, in student tokens.

    Takes the tokens of N segments, [N] and [N] (or [N, K] for K teachers), none beyond its limit;
    gives the segment numbers of each block, in order. O(N log N), and N operations on a bit set.

    >>> pack([5, 3, 2, 4], [5, 3, 2, 4], max_length=7, teacher_max_length=99)
    [[0, 2], [1, 3]]
    """
    sizes = np.column_stack((student_tokens, teacher_tokens)).astype(np.int64)
    limits = [max_length, *limits_of_teachers(teacher_max_length)][: sizes.shape[1]]
    if (sizes > limits).any():
        found = f"segments have up to {sizes.max(0).tolist()} tokens, beyond {limits}"
        raise ValueError(f"{found}: align and pack for the same limits")
    # Rounded up: a segment never needs less than it says.
    by_model = zip(sizes.T, limits, strict=True)
    needs = np.max([-(-size * max_length // limit) for size, limit in by_model], 0)
    blocks: list[list[int]] = []
    left: list[list[int]] = []  # the room of each block in each model's row
    # For each room, the blocks that have it; bit r of `rooms` is set where there are any.
    open_blocks: list[list[int]] = [[] for _ in range(max_length + 1)]
    rooms = 0
    for segment in np.argsort(-needs, kind="stable").tolist():
        need = int(needs[segment])
        # Rooms of at least `need`; the lowest bit that is left belongs to the fullest block.
        fitting = rooms >> need << need
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms &= ~(1 << room)
        else:
            block = len(blocks)
            blocks.append([])
            left.append(limits)
        blocks[block].append(segment)
        left[block] = [a - b for a, b in zip(left[block], sizes[segment].tolist(), strict=True)]
        room = min(a * max_length // limit for a, limit in zip(left[block], limits, strict=True))
        open_blocks[room].append(block)
        rooms |= 1 << room
    return [sorted(block) for block in blocks]


def padded_width(longest: int, limit: int) -> int:
    """Columns of a teacher's rows: few different numbers, and none beyond its context.

    >>> padded_width(65, 4096), padded_width(65, 100)
    (128, 100)
    """
    return min(-(-longest // 64) * 64, limit)


def limits_of_teachers(teacher_max_length: int | Sequence[int]) -> Sequence[int]:
    """Give each teacher its limit: one number is that of a single teacher."""
    return [teacher_max_length] if isinstance(teacher_max_length, int) else teacher_max_length


def chunk_edges(tokens: int, chunks: int) -> IntArray:
    """Cut a sequence into chunks of equal token count (Section 2): [edges[c], edges[c + 1]).

    Chunk c of the student is guided by chunk c of the teacher; counts differ by at most one, and
    some chunks are empty where there are fewer tokens than chunks.

    >>> chunk_edges(10, 4).tolist()
    [0, 2, 5, 7, 10]
    """
    return np.arange(chunks + 1, dtype=np.int64) * tokens // chunks


class Blocks(Dataset[Block]):
    """Blocks of the rows of `vocagnolm.data.Segments`; `blocks[i]` reads only its own rows.

    A block holds `max_length` student tokens, and `teacher_max_length` of the, or each, teacher.
    Rows of several corpora, one behind the other, are packed apart: `parts` are those of each by
    its name, and the attribute `parts` the blocks of each.
    """

    def __init__(
        self,
        segments: "datasets.Dataset",
        max_length: int,
        teacher_max_length: int | Sequence[int],
        parts: Mapping[str, int] | None = None,
    ):
        # Comes with `datasets`, without which a trainer can be given blocks of another kind.
        import pyarrow.compute as pc

        tokens = np.asarray(segments.with_format("numpy")["student_tokens"][:], np.int64)
        counts = pc.list_flatten(segments.with_format("arrow")["teacher_counts"][:])
        teachers = len(counts) // max(len(segments), 1)
        by_teacher = np.asarray(counts, np.int64).reshape(len(segments), teachers)
        packed: list[list[int]] = []
        self.parts, first = {}, 0
        for name, size in (parts or {"": len(segments)}).items():
            part = slice(first, first + size)
            found = pack(tokens[part], by_teacher[part], max_length, teacher_max_length)
            packed += [[first + segment for segment in block] for block in found]
            self.parts[name], first = len(found), first + size
        self.max_length, self.teacher_max_length = max_length, teacher_max_length
        self.student_tokens = int(tokens.sum())
        # Block b holds the segments order[edges[b] : edges[b + 1]].
        self._order = np.array([segment for block in packed for segment in block], dtype=np.int64)
        self._edges = np.cumsum([0, *map(len, packed)])
        # Tokens of the longest segment, and of the blocks, for the student and each teacher.
        sizes = np.column_stack([tokens, by_teacher])
        rows = np.add.reduceat(sizes[self._order], self._edges[:-1]) if packed else sizes
        self._longest: list[int] = sizes.max(0, initial=0).tolist()
        self._widest: list[int] = rows.max(0, initial=0).tolist()
        self.teacher_tokens: IntArray = rows[:, 1:].sum(1)
        self._rows = segments.select_columns([*_COLUMNS, *_SPANS]).with_format("numpy")

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, block: int) -> Block:
        return as_block(block, self._rows[self.segments(block)])

    def segments(self, block: int) -> IntArray:
        """Return the numbers of a block's segments."""
        numbers: IntArray = self._order[self._edges[block] : self._edges[block + 1]]
        return numbers

    def longest_segments(self, attend_across_documents: bool = False) -> list[int]:
        """Return the tokens of the longest segment that the student, and each teacher, reads."""
        if not attend_across_documents:
            return self._longest
        limits = limits_of_teachers(self.teacher_max_length)
        return [self.max_length, *map(padded_width, self._widest[1:], limits)]

    @property
    def fill_fraction(self) -> float:
        """Share of the positions that hold a token, in [0, 1]."""
        return self.student_tokens / max(len(self) * self.max_length, 1)
