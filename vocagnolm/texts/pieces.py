"""Texts given to a tokenizer in groups and pieces of bounded size.

A tokenizer holds some 250 times as much as the text that it reads; what it gives, some 20 bytes a
token.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.texts.tokens import Spans, Tokens

# Characters that are read at once, and those that two pieces of a text share.
AT_ONCE, SHARED = 1 << 20, 1 << 13

Encode = Callable[[Sequence[str]], Tokens]


def encode_in_pieces(encode: Encode, texts: Sequence[str]) -> Tokens:
    """Return what `encode` gives for texts, without their all being read at once."""
    found = []
    for group in grouped(dict(enumerate(texts))):
        few = [*group.values()]
        is_long = sum(map(len, few)) > AT_ONCE + SHARED
        found.append(_encode_long(encode, *few) if is_long else encode(few))
    return found[0] if len(found) == 1 else Tokens.concatenate(found)


def grouped(texts: Mapping[int, str]) -> Iterator[dict[int, str]]:
    """Yield numbered texts in groups, at least one; a text that is long is alone."""
    group: dict[int, str] = {}
    size = 0
    for number, text in texts.items():
        if group and size + len(text) > AT_ONCE:
            yield group
            group, size = {}, 0
        group[number] = text
        size += len(text)
    yield group


def _encode_long(encode: Encode, text: str) -> Tokens:
    """Read a text in pieces; one takes over from another where both have the same tokens.

        piece    . . . . . . . . . . . .
        next             . . . . . . . . . . .     from `middle` on
        shared           [ | same | ]

    A text of which they have not, as it is a run of one character, is read as a whole.
    """
    ids: list[npt.NDArray[Any]] = []
    spans: list[Spans] = []
    for start in range(0, len(text) - SHARED, AT_ONCE):
        piece = encode([text[start : start + AT_ONCE + SHARED]])
        own, places = piece.values, piece.spans + start
        if start:
            quarters = start + SHARED // 4 * np.arange(1, 4)
            low, middle, high = places[:, 0].searchsorted(quarters)
            first, last, end = spans[-1][:, 0].searchsorted(quarters)
            pairs = (ids[-1][first:end], own[low:high]), (spans[-1][first:end], places[low:high])
            if low == high or not all(np.array_equal(*pair) for pair in pairs):
                return encode([text])
            ids[-1], spans[-1] = ids[-1][:last], spans[-1][:last]
            own, places = own[middle:], places[middle:]
        ids.append(own)
        spans.append(places)
    flat = np.concatenate(ids)
    return Tokens(flat, np.concatenate(spans), np.array([0, len(flat)]))
