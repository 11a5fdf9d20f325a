"""Texts cut into segments at good places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import Spans

# Why a document is skipped that cannot be cut.
EMPTY = "a tokenizer finds no token in it"
# Aim below the limit: a good place to cut is looked for before it.
_FILL = 0.95


def cut_text(
    text: str, models: Sequence[Spans], limits: Sequence[int], marks: Sequence[int] = ()
) -> list[int] | str:
    """Cut a text at marks, and into about equal parts; return the edges, or why it cannot be.

    Of each model it takes the spans [N, 2] of the text's tokens, and the most tokens of a part. No
    token of a model goes through a cut, where there is such a place; a paragraph, line or word ends
    there, if one ends in the last eighth before the limit.
    """
    places = np.zeros((len(models), len(text) + 1), np.bool_)
    for free, spans in zip(places, models, strict=True):
        free[spans[:-1, 1][spans[1:, 0] >= spans[:-1, 1]]] = True
    # Of all models, or else of the student.
    places = np.stack((places.all(axis=0), places[0]))
    edges = [0]
    for mark in (*marks, len(text)):
        while True:
            at = edges[-1]
            first = [spans[:, 1].searchsorted(at, side="right") for spans in models]
            last = [spans[:, 0].searchsorted(mark, side="left") for spans in models]
            tokens = zip(first, last, limits, strict=True)
            share = max((b - a) / limit for a, b, limit in tokens)
            if share <= 1:
                break
            # Equal parts of what is left; all of a context if a character has so many tokens.
            for aim in (share / math.ceil(share / _FILL), 1.0):
                behind = zip(models, first, limits, strict=True)
                reach = ((one, a + int(aim * limit)) for one, a, limit in behind)
                stop = min(int(one[n, 0]) if n < len(one) else mark for one, n in reach)
                if stop > at:
                    break
            else:
                return f"character {at} alone exceeds a context"
            edges.append(_best(text, places, at, stop))
        edges.append(mark)
    is_empty = any(
        (ends.searchsorted(edges[:-1], "right") >= starts.searchsorted(edges[1:])).any()
        for starts, ends in (spans.T for spans in models)
    )
    return EMPTY if is_empty else edges


def _best(text: str, places: npt.NDArray[np.bool_], start: int, stop: int) -> int:
    """Find the best place to cut in the last eighth up to `stop`, or else half, and the last of it.

    start ........................ half ......... eighth ....... stop
    """

    def rank(place: int) -> int:
        before, after = text[max(place - 2, 0) : place], text[place : place + 1]
        if before.endswith("\n"):
            return 0 if before == "\n\n" else 1
        return 2 if before.endswith(" ") or after == " " else 3

    best: list[int] = []
    for free, part in product(places, (8, 2)):
        floor = stop - (stop - start) // part
        found = np.flatnonzero(free[floor + 1 : stop + 1])[::-1] + floor + 1
        best += [min(found.tolist(), key=rank)] if len(found) else []
        if best and rank(best[-1]) < 3:
            return best[-1]
    return best[0] if best else stop
