"""Columns of segments: the tokens of all models between the cuts, row by row, and their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vocagnolm.texts.tokens import Spans, Tokens

IntArray = npt.NDArray[np.int64]
# Types of the arrays of a row; ids are narrower where a vocabulary allows it.
_ARRAYS = {
    **dict.fromkeys(("student_ids", "teacher_ids", "teacher_counts"), "int32"),
    "teacher_losses": "float32",
    **dict.fromkeys(("student_steps", "teacher_steps"), "uint8"),
    **dict.fromkeys(("student_jumps", "teacher_jumps"), "int32"),
    **dict.fromkeys(("student_labelled", "teacher_labelled"), "int32"),
}
TEACHER_ARRAYS = tuple(name for name in _ARRAYS if name.startswith("teacher_"))
_NUMBERS = (
    *("document", "start", "end"),
    *("student_tokens", "teacher_tokens", "text_tokens", "unmapped_text_tokens"),
    *("left_out_messages", "trimmed_characters"),
)


@dataclass(frozen=True, eq=False)
class Part:
    """A model's tokens by number of the segment; spans are on the axis of all texts."""

    rows: IntArray
    values: npt.NDArray[Any]
    spans: Spans
    # Of each segment.
    counts: IntArray


def unnumbered(ours: Part, theirs: Part) -> npt.NDArray[np.bool_]:
    """Tell the student's tokens of whose number a teacher has none."""
    number = np.arange(len(ours.rows)) - (np.cumsum(ours.counts) - ours.counts)[ours.rows]
    return number >= theirs.counts[ours.rows]


def lay_out(
    segments: IntArray,
    lengths: IntArray,
    student: Tokens,
    teachers: Sequence[Tokens],
    is_unmapped: Callable[[Part, Part], npt.NDArray[np.bool_]],
) -> dict[str, Any]:
    """Make the columns of `data.Segments` of segments [S, 3] of texts: number, start and end.

    A column has numbers, or is (edges, values) of arrays. A token that a cut goes through is in
    both segments, one of a chat template has no characters. Teachers' tokens follow one another in
    a row, each behind its start token, which has no span:

        B a b c | B d e         counts [4, 3]
          0 1 2     3 4         spans
    """
    texts, starts, ends = segments.T
    rows, is_last = np.arange(len(texts)), ends == lengths[texts]
    # All texts on one axis, and room around each for tokens without characters.
    origins = np.cumsum(lengths + 2) - lengths - 1
    low, high = origins[texts] + starts, origins[texts] + ends
    around = low - (starts == 0), high + is_last
    ours, *theirs = (_take(one, origins, around, low, high) for one in (student, *teachers))
    unmapped = np.full(len(ours.rows), not theirs)
    for part in theirs:
        unmapped |= is_unmapped(ours, part)
    has_text = ours.spans[:, 0] < ours.spans[:, 1]
    unmapped &= has_text
    closed = rows[is_last & (student.end is not None)]
    opening = (rows, np.full(len(rows), student.start))
    closing = (closed, np.full(len(closed), student.end or 0))
    columns = {
        "start": starts,
        "end": ends,
        "student_ids": _by_row(rows, opening, (ours.rows, ours.values), closing),
        "student_tokens": 1 + ours.counts + np.bincount(closed, minlength=len(rows)),
        "teacher_tokens": sum((part.counts for part in theirs), 0 * rows) + len(theirs),
        "text_tokens": np.bincount(ours.rows[has_text], minlength=len(rows)),
        "unmapped_text_tokens": np.bincount(ours.rows[unmapped], minlength=len(rows)),
    }
    if theirs:
        begun = [(rows, np.full(len(rows), one.start, one.values.dtype)) for one in teachers]
        name = "teacher_ids" if teachers[0].values.dtype.kind == "i" else "teacher_losses"
        read = [(part.rows, part.values) for part in theirs]
        columns[name] = _by_row(rows, *chain.from_iterable(zip(begun, read, strict=True)))
        columns["teacher_counts"] = _by_row(rows, *((rows, 1 + part.counts) for part in theirs))
    for side, parts in (("student", [ours]), ("teacher", theirs)):
        moved = ((one.rows, one.spans - low[one.rows, None]) for one in parts)
        if parts:
            columns[f"{side}_spans"] = _by_row(rows, *moved)
    return columns


def _take(
    model: Tokens,
    origins: IntArray,
    around: tuple[IntArray, IntArray],
    low: IntArray,
    high: IntArray,
) -> Part:
    spans = model.spans + np.repeat(origins, np.diff(model.edges))[:, None]
    first = spans[:, 1].searchsorted(around[0], side="right")
    # Behind those that end there, and those that a cut goes through.
    ending = spans[:, 1].searchsorted(around[1], side="right")
    through = spans[:, 0].searchsorted(around[1])
    counts = np.maximum(ending, through) - first
    rows = np.repeat(np.arange(len(low)), counts)
    take = np.arange(len(rows)) + (first - np.cumsum(counts) + counts)[rows]
    clipped = spans[take].clip(low[rows, None], high[rows, None])
    return Part(rows, model.values[take], clipped, counts)


def _by_row(
    rows: IntArray, *parts: tuple[IntArray, npt.NDArray[Any]]
) -> tuple[IntArray, npt.NDArray[Any]]:
    """Lay out the values of each row, (row numbers, values) of parts one behind the other."""
    numbers = np.concatenate([part[0] for part in parts])
    order = numbers.argsort(kind="stable")
    edges = numbers[order].searchsorted(np.arange(len(rows) + 1))
    return edges, np.concatenate([part[1] for part in parts])[order]


def column_types(*largest_ids: int) -> datasets.Features:
    """Return the types of the columns, by the largest ids of the student and of the teachers."""
    types = dict(_ARRAYS)
    for name, largest in zip(("student_ids", "teacher_ids"), largest_ids, strict=True):
        # Two bytes, where they fit.
        if largest <= np.iinfo(np.uint16).max:
            types[name] = "uint16"
    arrays = {name: datasets.List(datasets.Value(dtype)) for name, dtype in types.items()}
    numbers = dict.fromkeys(_NUMBERS, datasets.Value("int32"))
    return datasets.Features({**arrays, **numbers, "skipped": datasets.Value("string")})


def as_table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Make a table of columns as `lay_out` has them; others hold nothing."""
    rows = len(columns["document"])
    arrays = [_column(columns.get(field.name), field.type, rows) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    """Make a column of numbers, or of arrays laid end to end; of nothing without values."""
    if not pa.types.is_list(kind):
        absent = pa.nulls(rows, kind) if pa.types.is_string(kind) else np.zeros(rows, np.int32)
        return pa.array(absent if values is None else values, kind)
    edges, flat = (np.zeros(rows + 1), np.empty(0)) if values is None else values
    content = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False))
    return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), content, type=kind)
