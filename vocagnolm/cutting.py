"""Cuts texts into segments at good places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import Spans

# The reason for skipping a document that cannot be cut.
EMPTY = "a tokenizer finds no token in it, or a store has no losses of it"
# Aim below the limit, because a good place to cut lies before it.
_FILL = 0.95


def cut_text(text: str, models: Sequence[Spans], limits: Sequence[int]) -> list[int] | str:
    """Cut a text into about equal parts. Returns their edges, or why it cannot be cut.

    `models` has the spans [N, 2] of each model's tokens, and `limits` the most tokens that a part
    may have. If possible, no token of any model is split. A part ends with a paragraph, line or
    word if one ends in the last eighth before the limit.
    """
    # The places where a cut splits no token of a model.
    is_free = np.zeros((len(models), len(text) + 1), np.bool_)
    for model, spans in enumerate(models):
        # A place between two tokens is free if they share no character.
        starts, ends = spans[1:, 0], spans[:-1, 1]
        is_free[model, ends[starts >= ends]] = True
    # Try the places that are free for all models first, then those that are free for the student.
    places = np.stack((is_free.all(axis=0), is_free[0]))
    edges = [0]
    # Cut parts off the front until the rest fits. Every cut is after the one before, so this ends.
    while True:
        stop = _next_stop(models, limits, edges[-1], len(text))
        if stop is None:
            break
        if stop == edges[-1]:
            return f"character {stop} alone exceeds a context"
        edges.append(_best(text, places, edges[-1], stop))
    edges.append(len(text))
    # A model that has no token in a part could not read it. A token of a part ends after the part
    # starts and starts before the part ends.
    for spans in models:
        ends_after_start = spans[:, 1].searchsorted(edges[:-1], side="right")
        starts_before_end = spans[:, 0].searchsorted(edges[1:])
        if (ends_after_start >= starts_before_end).any():
            return EMPTY
    return edges


def _next_stop(models: Sequence[Spans], limits: Sequence[int], start: int, end: int) -> int | None:
    """Return where a part that starts at `start` must end. None if it reaches the end of the text.

    If not even one character fits, the part ends where it starts.
    """
    first_tokens = [int(spans[:, 1].searchsorted(start, side="right")) for spans in models]
    # How many contexts the rest of the text fills, for the model that needs the most.
    share = 0.0
    for spans, first, limit in zip(models, first_tokens, limits, strict=True):
        last = spans[:, 0].searchsorted(end, side="left")
        share = max(share, (last - first) / limit)
    if share <= 1:
        return None
    # Cut the rest into equal parts. If one character has more tokens than such a part, the part may
    # fill a whole context.
    for aim in (share / math.ceil(share / _FILL), 1.0):
        stop = end
        for spans, first, limit in zip(models, first_tokens, limits, strict=True):
            # The part has the tokens up to `beyond`, so it ends where that token starts.
            beyond = first + int(aim * limit)
            if beyond < len(spans):
                stop = min(stop, int(spans[beyond, 0]))
        if stop > start:
            return stop
    return start


def _best(text: str, places: npt.NDArray[np.bool_], start: int, stop: int) -> int:
    """Find the best place to cut in the last eighth up to `stop`, or else in the last half.

    Among equally good places it is the last one. If there is none, it is `stop` itself.

    start ........................ half ......... eighth ....... stop
    """

    def rank(place: int) -> int:
        before, after = text[max(place - 2, 0) : place], text[place : place + 1]
        if before.endswith("\n"):
            return 0 if before == "\n\n" else 1
        return 2 if before.endswith(" ") or after == " " else 3

    # The best place of each search that finds one. The first is taken, unless it is inside a word
    # (rank 3) and a later search finds a better one.
    best: list[int] = []
    for is_free, part in product(places, (8, 2)):
        floor = stop - (stop - start) // part
        # The last place comes first, so it wins among places of the same rank.
        candidates = np.flatnonzero(is_free[floor + 1 : stop + 1])[::-1] + floor + 1
        if not len(candidates):
            continue
        best.append(min(candidates.tolist(), key=rank))
        if rank(best[-1]) < 3:
            return best[-1]
    return best[0] if best else stop
