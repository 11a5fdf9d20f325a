"""Spans in one byte per token, as a store keeps them.

Ends never go back and no character lies between two tokens, so a token is known from the end of the
one before: by the characters it goes beyond it (length), and those it shares (overlap).
"""

import numpy as np
import numpy.typing as npt

from vocagnolm.spans import Spans

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
    assert min(length.min(initial=0), overlap.min(initial=0)) >= 0, "spans leave a gap, or go back"
    codes = 2 * length + overlap
    is_exception = (overlap > 1) | (codes >= _ESCAPE)
    where = np.flatnonzero(is_exception)
    exceptions = np.stack([where, length[where], overlap[where]], axis=-1).ravel()
    return np.where(is_exception, _ESCAPE, codes).astype(np.uint8), exceptions.astype(np.int32)


def decode_spans(
    codes: npt.NDArray[np.uint8], exceptions: npt.NDArray[np.int32], start: int
) -> Spans:
    """Invert `encode_spans`; int64 [N, 2]."""
    length, overlap = (codes >> 1).astype(np.int64), (codes & 1).astype(np.int64)
    where, lengths, overlaps = exceptions.astype(np.int64).reshape(-1, 3).T
    length[where], overlap[where] = lengths, overlaps
    ends = start + np.cumsum(length)
    # The end of the token before is `ends - length`; a token begins `overlap` characters earlier.
    return np.stack([ends - length - overlap, ends], axis=-1)
