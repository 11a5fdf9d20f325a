"""Losses from a teacher behind a server: one number per token is all that must come back.

Windows are those of a teacher that is loaded here. What comes back is checked against what was
asked for: its tokens, that none lacks a loss, and that every loss is a number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vocagnolm.host.units import duration
from vocagnolm.spans import encode, encode_batch
from vocagnolm.store.dialects import DIALECTS, Dialect, OpenAIDialect, Prompt, PromptTokens
from vocagnolm.store.server import RefusedRequestError, Server
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import Unscored, Window
from vocagnolm.tokenizers import PROBE, Reader

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

# Repetitions while a dialect is looked for: a server that knows another may fail at this one.
_PROBED = 4
# Times that an answer of other tokens, or without a number, is asked for.
_ASKED = 5
# Raised by a dialect that reads something else than it has asked for.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
# Decoders say this for a part of a character.
_PART = "\ufffd"
# vLLM says this for minus infinity.
_NO_NUMBER_NATS = 9999.0
# Requests before the time is estimated, and seconds between two lines about the progress.
_FIRST, _LOG_S = 32, 30.0
_KINDS = (
    "serve the teacher with vLLM (prompt_logprobs), SGLang (logprob_start_len), or a server whose "
    "completions echo a prompt with logprobs, such as llama-cpp-python's with logits_all"
)


@dataclass(frozen=True)
class Form:
    """A dialect, and how a prompt is given: as ids, or as text behind a text for the start token.

    That text is empty where the server puts its start token itself. `first` has the losses of first
    tokens, by text, where the server keeps them to itself.
    """

    dialect: Dialect
    lead: str | None = None
    first: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.dialect.name}, {'ids' if self.lead is None else 'text'}"


class ServedScorer:
    """Scores windows of a reader's tokens with a model that a server has under a name."""

    def __init__(self, server: Server, model: str, reader: Reader, form: Form):
        self._server, self._model, self._reader, self._form = server, model, reader, form
        self._meter = _Meter(server)
        self._texts: dict[int, str] = {}

    @property
    def about(self) -> dict[str, object]:
        """Say in a store how it was made; the server's weights and their dtype are not known."""
        return {
            "engine": "served",
            "server": self._server.host,
            "served_model": self._model,
            "dialect": str(self._form),
            "dtype": None,
            "teacher_revision": None,
        }

    def expect(self, documents: int, sample: Sequence[str]) -> None:
        """Tell how much is to be done, by some of the documents."""
        if not sample:
            return
        reader = self._reader
        counts = np.array([len(one.ids) for one in encode_batch(reader.tokenizer, sample)])
        tokens = documents * counts.mean()
        requests = documents * np.ceil(counts / reader.text_limit).mean()
        self._meter.expected_tokens = int(tokens)
        logger.info(
            "%s at %s (%s): %s documents, about %s tokens in %s requests, %d at once",
            *(self._model, self._server.url, self._form),
            *(f"{documents:,}", f"{tokens:,.0f}", f"{requests:,.0f}", self._server.concurrency),
        )

    def losses(self, windows: Sequence[Window]) -> list[LossArray | Unscored]:
        """Return the losses of the scored tokens of each window, in nats; some may fail."""
        return asyncio.run(self._all_losses(windows))

    async def _all_losses(self, windows: Sequence[Window]) -> list[LossArray | Unscored]:
        gate = asyncio.Semaphore(self._server.concurrency)
        async with self._server.connected() as client:

            async def one(window: Window) -> LossArray | Unscored:
                async with gate:
                    found = await self.window_losses(client, window)
                self._meter.add(window.scored)
                return found

            return list(await asyncio.gather(*map(one, windows)))

    async def window_losses(
        self, client: httpx.AsyncClient, window: Window, times: int | None = None
    ) -> LossArray | Unscored:
        """Ask for a window, again where the answer is not what was asked for."""
        dialect, reason = self._form.dialect, ""
        prompt: Prompt = window.ids
        if self._form.lead is not None:
            prompt = self._form.lead + str(self._reader.tokenizer.decode(window.ids[1:]))
        body = dialect.request(self._model, prompt)
        for _ in range(_ASKED):
            try:
                answer = await self._server.ask(client, dialect.path, body, times)
            except RefusedRequestError as error:
                return Unscored(f"the server answers {error}")
            try:
                return self._checked(dialect.read(answer, prompt), window)
            except _MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
        return Unscored(f"the server does not answer with its losses ({reason})")

    def _checked(self, found: PromptTokens, window: Window) -> LossArray:
        """Return the losses of a window; a ValueError where they are not of its tokens."""
        count = len(window.ids)
        if len(found.losses) != count:
            raise ValueError(f"{len(found.losses)} tokens instead of {count}")
        for at in range(1, count):
            expected = window.ids[at]
            if found.ids and found.ids[at] != expected:
                raise ValueError(f"token {at} has id {found.ids[at]}, not {expected}")
            text = found.texts[at] if found.texts else None
            if text is not None and _visible(text) != _visible(self._text(expected)):
                raise ValueError(f"token {at} is {text!r}, not {self._text(expected)!r}")
        losses = np.array(found.losses[count - window.scored :], np.float32)
        if self._form.first and window.scored == count - 1:
            losses[0] = self._form.first.get(self._text(window.ids[1]), np.nan)
        bad = np.flatnonzero(~(losses < _NO_NUMBER_NATS))
        if len(bad):
            raise ValueError(f"no loss of {len(bad)} tokens, the first of them number {bad[0] + 1}")
        return losses

    def _text(self, token: int) -> str:
        """Return the text of a token behind the start token, as decoders may trim a space."""
        if token not in self._texts:
            decode, start = self._reader.tokenizer.decode, self._reader.start
            self._texts[token] = str(decode([start, token]))[len(decode([start])) :]
        return self._texts[token]


def _visible(text: str) -> str:
    """Return what servers agree upon of a token: not its spaces, nor parts of a character."""
    return text.replace(_PART, "").replace("\u2581", " ").strip()


def find_form(server: Server, model: str, reader: Reader, dialect: str | None) -> Form:
    """Ask for a short prompt in every way, or those of one dialect; return the first that works."""
    return asyncio.run(_find_form(server, model, reader, dialect))


async def _find_form(server: Server, model: str, reader: Reader, dialect: str | None) -> Form:
    ids = encode(reader.tokenizer, PROBE).ids.tolist()[: reader.limit - 1]
    window, reasons = Window(0, [reader.start, *ids], len(ids)), {}
    async with server.connected() as client:
        for one in [DIALECTS[dialect]] if dialect else DIALECTS.values():
            async for form in _forms(one, server, client, model, reader):
                scorer = ServedScorer(server, model, reader, form)
                try:
                    found = await scorer.window_losses(client, window, _PROBED)
                except ConnectionError:
                    raise
                except (OSError, ValueError) as error:
                    found = Unscored(str(error))
                if not isinstance(found, Unscored) and np.ptp(found):
                    return form
                reasons[one.name] = found.reason if isinstance(found, Unscored) else "all are equal"
    shown = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"--server {server.url} gives no losses of a prompt ({shown}): {_KINDS}")


async def _forms(
    dialect: Dialect, server: Server, client: httpx.AsyncClient, model: str, reader: Reader
) -> AsyncIterator[Form]:
    """Yield the ways to ask in a dialect, the most exact first."""
    yield Form(dialect)
    start = str(reader.tokenizer.decode([reader.start]))
    yield Form(dialect, start)
    if isinstance(dialect, OpenAIDialect):
        body = dialect.request_first(model, start, len(reader.tokenizer))
        try:
            first = dialect.read_first(await server.ask(client, dialect.path, body, _PROBED))
            yield Form(dialect, start, first)
        except (RefusedRequestError, OSError, *_MALFORMED):
            pass
    yield Form(dialect, "")


class _Meter:
    """Tells the speed of a server, and the time that is left."""

    def __init__(self, server: Server):
        self._server, self.expected_tokens = server, 0
        self._requests = self._tokens = 0
        self._started = self._told = time.monotonic()

    def add(self, tokens: int) -> None:
        """Count an answered request."""
        now = time.monotonic()
        self._requests, self._tokens = self._requests + 1, self._tokens + tokens
        if self._requests == _FIRST or now - self._told >= _LOG_S:
            self._told = now
            per_s = self._tokens / max(now - self._started, 1e-9)
            left_s = max(0, self.expected_tokens - self._tokens) / per_s
            logger.info(
                "%s of about %s tokens, %s per second, %s left, %s requests sent again",
                *(f"{count:,.0f}" for count in (self._tokens, self.expected_tokens, per_s)),
                duration(left_s),
                f"{self._server.asked_again:,}",
            )
