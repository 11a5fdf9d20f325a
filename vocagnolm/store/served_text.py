"""Losses from a server whose tokenizer is not at hand: its tokens are found in the text.

A document is asked for as a whole. Where the texts of the tokens that come back do not make up the
document, character by character, it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from vocagnolm.spans import Spans
from vocagnolm.store.dialects import PromptTokens
from vocagnolm.store.served import PART, PROBED, Form, Served, UnaskableError, numbers
from vocagnolm.store.server import Server
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import Unscored
from vocagnolm.tokenizers import PROBE

if TYPE_CHECKING:
    import httpx


class ServedReader(Served):
    """Reads and scores texts, each in one request, of at most `context` tokens."""

    def __init__(self, server: Server, model: str, form: Form, context: int):
        super().__init__(server, model, form)
        self._context = context

    def read(self, texts: Sequence[str]) -> list[tuple[Spans, LossArray] | Unscored]:
        """Return the spans and the losses of each text's tokens; some may fail."""
        checks = [partial(self._checked, text) for text in texts]
        return self._ask_all([f"{self._form.lead}{text}" for text in texts], checks)

    async def probe(self, client: httpx.AsyncClient) -> LossArray | Unscored:
        """Ask for the losses of a short text."""
        if self._form.lead is None:
            return Unscored("it cannot be asked for ids without a tokenizer")
        # Other characters may be told in parts.
        text = PROBE.encode("ascii", "ignore").decode()[: self._context // 2]
        found = await self.ask(client, self._form.lead + text, partial(self._checked, text), PROBED)
        return found if isinstance(found, Unscored) else found[1]

    def _checked(self, text: str, found: PromptTokens) -> tuple[Spans, LossArray]:
        """Return the tokens of a text; a ValueError where it is made of others."""
        if len(found.losses) > self._context:
            tokens = f"{len(found.losses):,} tokens"
            raise UnaskableError(f"it has {tokens}, more than --context {self._context}")
        spans = find_spans(text, [piece or "" for piece in found.texts[1:]])
        losses = np.array(found.losses[1:], np.float32)
        losses = self._form.with_first(losses, found.texts[1] or "")
        self.meter.tokens += len(losses)
        return spans, numbers(losses)


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
        spans.append((start, end + is_part))
        at, is_open = end, is_part
    if at + is_open != len(text):
        raise ValueError(f"{len(pieces)} tokens end at character {at} of {len(text)}")
    return np.array(spans, np.int64).reshape(-1, 2)
