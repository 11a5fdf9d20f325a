"""Tokens of texts: their values, and the characters that each has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# [N, 2], half-open, in characters (Unicode code points) of the text.
Spans = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Encoding:
    """N tokens of one text, without special tokens."""

    ids: npt.NDArray[np.int32]
    spans: Spans


@dataclass(frozen=True, eq=False)
class Tokens:
    """N tokens of one model in T texts, concatenated.

    Text t has those from edges[t] up to edges[t + 1]; spans are in characters of the text. `values`
    are ids or, of an offline teacher, losses in nats; `start` is that of the token
    before each segment (NaN for a loss), or those of all segments, `end` of the one behind the last
    of a text, if any.
    """

    values: npt.NDArray[Any]
    spans: Spans
    edges: npt.NDArray[np.int64]
    start: float | npt.NDArray[Any] = math.nan
    end: int | None = None

    @classmethod
    def join(cls, values: Sequence[npt.ArrayLike], spans: Sequence[Spans], dtype: str) -> Tokens:
        """Lay out what each text has."""
        flat = np.concatenate([[], *values], dtype=dtype, casting="unsafe")
        none = np.empty((0, 2), np.int64)
        return cls(flat, np.concatenate([none, *spans]), np.cumsum([0, *map(len, spans)]))

    def encoding(self, text: int) -> Encoding:
        """Return the tokens of one text."""
        part = slice(self.edges[text], self.edges[text + 1])
        return Encoding(self.values[part], self.spans[part])
