"""The columns of a shard, with spans in one byte per token.

Ends never go back and no character lies between two tokens, so a token is known from the end of the
one before: by the characters it goes beyond it (length), and those it shares (overlap).
"""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vocagnolm.texts.offsets import find_disorder
from vocagnolm.texts.tokens import Spans

LossDtype = Literal["float16", "float32"]
KEY_BYTES = 16

# characters    0   1   2   3   4   5
# token 0       [-------)                 length 2, overlap 0   code 2 * 2 + 0 = 4
# token 1               [---)             length 1, overlap 0   code 2
# token 2               [---)             length 0, overlap 1   code 1: a byte of an emoji
# token 3                   [-------)     length 2, overlap 0   code 4
#
# An overlap above 1, or a length above 126, is rare: its code is 255, and its numbers are listed.
_ESCAPE = 255


def encode_spans(spans: Spans, start: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Encode spans that leave no gap as a byte per token, and a list of the few that need more.

    Takes spans [N, 2], starts and ends non-decreasing, that begin at the character `start`; returns
    codes, uint8 [N], 2 x length + overlap, and for every code 255 its position, length and overlap,
    int32 [3 M].

    >>> codes, exceptions = encode_spans(np.array([[0, 2], [2, 3], [2, 3], [3, 400]]), 0)
    >>> codes.tolist(), exceptions.tolist()
    ([4, 2, 1, 255], [3, 397, 0])
    """
    before = np.concatenate([[start], spans[:-1, 1]])
    length, overlap = spans[:, 1] - before, before - spans[:, 0]
    if min(length.min(initial=0), overlap.min(initial=0)) < 0:
        raise ValueError("spans leave a gap, or go back")
    codes = 2 * length + overlap
    is_exception = (overlap > 1) | (codes >= _ESCAPE)
    where = np.flatnonzero(is_exception)
    exceptions = np.stack([where, length[where], overlap[where]], axis=-1).ravel()
    return np.where(is_exception, _ESCAPE, codes).astype(np.uint8), exceptions.astype(np.int32)


def decode_spans(
    codes: npt.NDArray[np.uint8], exceptions: npt.NDArray[np.int32], start: int, end: int
) -> Spans:
    """Invert `encode_spans`; int64 [N, 2]. A ValueError where they do not cover [start, end)."""
    length, overlap = (codes >> 1).astype(np.int64), (codes & 1).astype(np.int64)
    where = np.flatnonzero(codes == _ESCAPE)
    if not np.array_equal(exceptions[::3], where) or len(exceptions) != 3 * len(where):
        raise ValueError("exceptions of other tokens than those that have one")
    length[where], overlap[where] = exceptions[1::3], exceptions[2::3]
    ends = start + np.cumsum(length)
    # The end of the token before is `ends - length`; a token begins `overlap` characters earlier.
    spans = np.stack([ends - length - overlap, ends], axis=-1)
    if len(spans) and not (spans[0, 0] == start and spans[-1, 1] == end):
        raise ValueError(f"spans from {spans[0, 0]} to {spans[-1, 1]} of a text [{start}, {end})")
    if find_disorder(spans) is not None or overlap.min(initial=0) < 0:
        raise ValueError("spans that leave a gap, or go back")
    return spans


def shard_schema(loss_dtype: LossDtype) -> pa.Schema:
    """Name the columns of a shard; all tokens of a segment are one value of the last three."""
    return pa.schema(
        {
            "document": pa.binary(KEY_BYTES),
            "start": pa.int32(),
            "end": pa.int32(),
            "codes": pa.list_(pa.uint8()),
            "exceptions": pa.list_(pa.int32()),
            "losses": pa.list_(pa.from_numpy_dtype(loss_dtype)),
        }
    )


def open_shard(path: Path) -> list[pa.RecordBatch]:
    """Map a shard, so that processes share the pages and nothing is read before it is needed."""
    try:
        reader = pa.ipc.open_stream(pa.memory_map(str(path)))
        if not any(reader.schema.equals(shard_schema(dtype)) for dtype in get_args(LossDtype)):
            found = ", ".join(f"{field.name}: {field.type}" for field in reader.schema)
            raise ValueError(f"its columns are {found}")
        batches = [batch for batch in reader if len(batch)]
        for batch in batches:
            # Lists whose ends lie outside of the file would be read all the same.
            batch.validate(full=True)
            lists = [column.values for column in batch.columns[-3:]]
            if any(column.null_count for column in batch.columns + lists):
                raise ValueError("a value is missing")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path.name}, which is no shard ({error})") from error
    return batches
