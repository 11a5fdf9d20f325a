"""Losses from a server whose tokenizer is not at hand: its tokens are found in the text.

A document is asked for as a whole, or in windows of its text where it exceeds the context. Where
the texts of the tokens that come back do not make it up, character by character, it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from vocagnolm.readers import DOCUMENT_SEPARATOR
from vocagnolm.store.dialects import PromptTokens
from vocagnolm.store.served import PART, PROBED, Refused, Served, numbers
from vocagnolm.store.server import Server
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import Unscored
from vocagnolm.texts.tokenizers import PROBE
from vocagnolm.texts.tokens import Spans

if TYPE_CHECKING:
    import httpx

# Characters of a token, before any of a document is known: where it may fit as a whole, and else.
_MOST, _USUAL = 4, 3
# Of a context, as the next characters may have more tokens than those before.
_FILL = 0.9
# Tokens beside the least context, among which two windows have to agree: at most, and of how many.
_SHARED, LEAST_CONTEXT = 16, 8
# More words than any model has.
_ANY_VOCABULARY = 10**6
_Tokens = tuple[Spans, LossArray]


class ServedReader(Served):
    """Reads and scores texts, in requests of at most `context` tokens.

    A further window of a text has `min_context` tokens before those that it scores.
    """

    def __init__(self, server: Server, model: str, context: int, min_context: int):
        super().__init__(server, model, DOCUMENT_SEPARATOR, _ANY_VOCABULARY)
        self._context, self._min_context = context, min_context

    def read(self, texts: Sequence[str]) -> list[_Tokens | Unscored]:
        """Return the spans and the losses of each text's tokens; some may fail."""
        return self.all_of(texts, self._read)

    def estimate(self, documents: int, sample: Sequence[str]) -> None:
        """Tell how much is to be done, by the characters of some of the documents."""
        window = _USUAL * (self._context - self._min_context)
        further = sum(max(0, len(text) - _MOST * self._context) / window for text in sample)
        characters = documents * sum(map(len, sample)) / len(sample)
        requests = documents * (1 + further / len(sample))
        self.expect(documents, requests, f"about {characters:,.0f} characters")

    async def probe(self, client: httpx.AsyncClient) -> LossArray | Unscored:
        """Ask for the losses of a short text."""
        if self.form.lead is None:
            return Unscored("it cannot be asked for ids without a tokenizer")
        # Other characters may be told in parts.
        text = PROBE.encode("ascii", "ignore").decode()[: self._context // 2]
        check = partial(self._checked, text, is_first=True)
        found = await self.ask(client, self.form.lead + text, check, PROBED)
        return found if isinstance(found, Unscored) else found[1]

    async def _read(self, client: httpx.AsyncClient, text: str) -> _Tokens | Unscored:
        """Read a text in windows, each of which shares tokens with the one before.

        With a context of 8, at least 2 tokens of it, and 1 more to agree upon (* is the place):

            window 0  s a b c d e f g
            window 1          s e f * g h i j k
        """
        spans, losses = np.empty((0, 2), np.int64), np.empty(0, np.float32)
        begin = end = 0
        refused: Unscored | None = None
        width = len(text) if len(text) <= _MOST * self._context else _USUAL * self._context
        while end < len(text):
            before, end = end, _word_end(text, end, begin + width)
            if end <= before:
                return refused or Unscored("a window of it has no room behind --min_context")
            asked = text[begin:end]
            check = partial(self._checked, asked, is_first=not begin)
            found = await self.ask(client, f"{self.form.lead}{asked}", check)
            self.meter.add()
            if isinstance(found, Refused) and len(asked.encode()) >= self._context:
                # It may be too long.
                refused, width, end = found, (before + end) // 2 - begin, before
                continue
            if isinstance(found, Unscored):
                return found
            places, values = found
            if len(values) >= self._context:
                # Shorter at least, as all that are too many may be parts of its last character.
                place = int(places[int(_FILL * self._context) - 2, 1])
                width, end = min(place, len(asked) - 1), before
                continue
            refused, kept, first = None, 0, 0
            if begin:
                both = joint(spans, places + begin, self._min_context)
                if both is None:
                    return Unscored("two windows cut it into other tokens where they meet")
                kept, first = both
            spans = np.concatenate([spans[:kept], places[first:] + begin])
            losses = np.concatenate([losses[:kept], values[first:]])
            width = int(len(asked) * _FILL * self._context / len(values))
            back = self._min_context + min(_SHARED, self._context // LEAST_CONTEXT)
            begin = int(spans[max(0, len(spans) - back), 0])
            # Some tokenizers put a space before a text.
            begin += text[begin] == " "
        self.meter.tokens += len(losses)
        return spans, losses

    def _checked(self, text: str, found: PromptTokens, *, is_first: bool) -> _Tokens:
        """Return the tokens of a text; a ValueError where it is made of others.

        Of a further window, whose first tokens are context, a server may keep the first loss.
        """
        spans = find_spans(text, [piece or "" for piece in found.texts[1:]])
        losses = np.array(found.losses[1:], np.float32)
        if is_first:
            losses = self.form.with_first(losses, found.texts[1] or "")
        numbers(losses[0 if is_first else 1 :])
        return spans, losses


def _word_end(text: str, begin: int, place: int) -> int:
    """Return a place to cut a text, before a space in its last quarter from `begin`, if any."""
    if place >= len(text):
        return len(text)
    space = max(text.rfind(mark, place - (place - begin) // 4, place + 1) for mark in " \n")
    return place if space < 0 else space


def joint(before: Spans, behind: Spans, least: int) -> tuple[int, int] | None:
    """Find where one window takes over from another, by the spans of their tokens in the text.

    Returns how many tokens of the one to keep, and the first of the other's: the last place with
    `least` tokens of its own before it where both have the same token on either side. None without.

    >>> one, other = np.array([[0, 2], [2, 3], [3, 5], [5, 6]]), np.array([[2, 3], [3, 5], [5, 8]])
    >>> joint(one, other, least=1)
    (2, 1)
    """
    since = int(before[:, 0].searchsorted(behind[0, 0]))
    pairs = pairwise(map(tuple, before[since:].tolist()))
    places = {pair: kept for kept, pair in enumerate(pairs, since + 1)}
    for first in range(len(behind) - 1, max(least, 1) - 1, -1):
        last, following = map(tuple, behind[first - 1 : first + 1].tolist())
        # Not within a character.
        if (last, following) in places and last[1] <= following[0]:
            return places[last, following], first
    return None


def find_spans(text: str, pieces: Sequence[str]) -> Spans:
    r"""Find the characters [N, 2] of N tokens in a text by the tokens' own texts.

    A part of a character is U+FFFD or nothing, as most decoders have it; all parts of one get that
    character. White space that a token's text lacks is the following token's. A ValueError where
    the tokens do not make up the text, or several characters in a row are told in parts only.

    >>> find_spans("a \U0001f600b", ["a", " \ufffd", "\ufffd", "b"]).tolist()
    [[0, 1], [1, 3], [2, 3], [3, 4]]
    """
    # `at` is the next character; it is `open` once a token has told a part of it.
    spans, at, is_open = [], 0, False
    for number, piece in enumerate(pieces):
        core = piece.strip(PART)
        if core and not text.startswith(piece, at):
            # The rest of an open character comes first, or the character as a whole.
            behind = at + is_open
            blank = len(text) - behind - len(text[behind:].lstrip())
            where = (at, behind, behind + blank)
            begins = [place for place in where if text.startswith(core, place)]
            if not begins and number == 0:
                # Some tokenizers put a space before a text.
                core = core.lstrip()
                begins = [0] if text.startswith(core) else []
            if not begins:
                raise ValueError(f"token {number} is {piece!r}, where {text[at : at + 20]!r} is")
            end = begins[0] + len(core)
            is_part = piece.endswith(PART)
            start = at if begins[0] > behind or piece.startswith(PART) else begins[0]
        elif core:
            start, end, is_part = at, at + len(piece), False
        else:
            start, end, is_part = at, at, True
        # A token of that space alone has the first character.
        spans.append((start, max(end + is_part, 1)))
        at, is_open = end, is_part
    if at + is_open != len(text):
        raise ValueError(f"{len(pieces)} tokens end at character {at} of {len(text)}")
    return np.array(spans, np.int64).reshape(-1, 2)
