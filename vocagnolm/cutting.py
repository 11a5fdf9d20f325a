"""Cuts texts into segments at good places."""

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


def cut_text(text: str, models: Sequence[Spans], limits: Sequence[int]) -> list[int] | str:
    """Cut a text into about equal parts; return their edges, or why it cannot be cut.

    `models` are the spans [N, 2] of the text's tokens, and `limits` the most tokens of a part, by
    model. No token of a model goes through a cut, where there is such a place; a paragraph, line
    or word ends there, if one ends in the last eighth before the limit.
    """
    # Places between two tokens of a model, where a cut goes through none of them.
    is_free = np.zeros((len(models), len(text) + 1), np.bool_)
    for model, spans in enumerate(models):
        # A place between two tokens is free if they do not share a character.
        starts, ends = spans[1:, 0], spans[:-1, 1]
        is_free[model, ends[starts >= ends]] = True
    # The places of all models are tried first, and then those of the student.
    places = np.stack((is_free.all(axis=0), is_free[0]))
    edges = [0]
    # Parts are cut off the front until the rest fits. Every cut lies after the one before it, so
    # that this ends.
    while True:
        stop = _next_stop(models, limits, edges[-1], len(text))
        if stop is None:
            break
        if stop == edges[-1]:
            return f"character {stop} alone exceeds a context"
        edges.append(_best(text, places, edges[-1], stop))
    edges.append(len(text))
    # A part that a model has no token in could not be read: no token would end after its start and
    # start before its end.
    for spans in models:
        ends_after_start = spans[:, 1].searchsorted(edges[:-1], side="right")
        starts_before_end = spans[:, 0].searchsorted(edges[1:])
        if (ends_after_start >= starts_before_end).any():
            return EMPTY
    return edges


def _next_stop(models: Sequence[Spans], limits: Sequence[int], start: int, end: int) -> int | None:
    """Return how far a part from `start` reaches; None if it reaches the end of the text.

    A part that cannot grow beyond its first character stops where it starts.
    """
    first_tokens = [int(spans[:, 1].searchsorted(start, side="right")) for spans in models]
    # The share says how many contexts the rest of the text fills, of the model that needs most.
    share = 0.0
    for spans, first, limit in zip(models, first_tokens, limits, strict=True):
        last = spans[:, 0].searchsorted(end, side="left")
        share = max(share, (last - first) / limit)
    if share <= 1:
        return None
    # What is left is cut into equal parts. If one character has more tokens than that, a part may
    # fill all of a context.
    for aim in (share / math.ceil(share / _FILL), 1.0):
        stop = end
        for spans, first, limit in zip(models, first_tokens, limits, strict=True):
            # The part has the tokens up to `beyond`, so it stops where that one starts.
            beyond = first + int(aim * limit)
            if beyond < len(spans):
                stop = min(stop, int(spans[beyond, 0]))
        if stop > start:
            return stop
    return start


def _best(text: str, places: npt.NDArray[np.bool_], start: int, stop: int) -> int:
    """Find the best place to cut in the last eighth up to `stop`, or else in the last half.

    Of equally good places it is the last one. Where there is none at all, it is `stop` itself.

    start ........................ half ......... eighth ....... stop
    """

    def rank(place: int) -> int:
        before, after = text[max(place - 2, 0) : place], text[place : place + 1]
        if before.endswith("\n"):
            return 0 if before == "\n\n" else 1
        return 2 if before.endswith(" ") or after == " " else 3

    # The best place of each search that finds one. The first of them is taken, unless a later
    # search finds a place that is not within a word, which rank 3 stands for.
    best: list[int] = []
    for is_free, part in product(places, (8, 2)):
        floor = stop - (stop - start) // part
        # The last place comes first, so that it wins among those of one rank.
        candidates = np.flatnonzero(is_free[floor + 1 : stop + 1])[::-1] + floor + 1
        if not len(candidates):
            continue
        best.append(min(candidates.tolist(), key=rank))
        if rank(best[-1]) < 3:
            return best[-1]
    return best[0] if best else stop
