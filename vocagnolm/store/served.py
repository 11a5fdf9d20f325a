"""Losses from a teacher behind a server: one number per token is all that must come back.

Windows are those of a teacher that is loaded here. What comes back is checked against what was
asked for: its tokens, that none lacks a loss, and that every loss is a number.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vocagnolm.io import duration
from vocagnolm.readers import Reader
from vocagnolm.spans import encode
from vocagnolm.store.dialects import Dialect, OpenAIDialect, Prompt, PromptTokens
from vocagnolm.store.server import RefusedRequestError, Server
from vocagnolm.store.store import LossArray
from vocagnolm.store.windows import Unscored, Window
from vocagnolm.texts.tokenizers import PROBE

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

# Repetitions while a dialect is looked for: a server that knows another may fail at this one.
PROBED = 4
# Times that an answer of other tokens, or without a number, is asked for.
_ASKED = 5
# Raised by a dialect that reads something else than it has asked for.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
# Decoders say this for a part of a character.
PART = "\ufffd"
# A first token told twice, in two batches; losses of other tokens are further apart.
_SAME_NATS = 0.5
# vLLM says this for minus infinity.
_NO_NUMBER_NATS = 9999.0
# Requests before the time is estimated, and seconds between two lines about the progress.
_FIRST, _LOG_S = 32, 30.0
_KINDS = (
    "serve the teacher with vLLM (prompt_logprobs), SGLang (logprob_start_len), or a server whose "
    "completions echo a prompt with logprobs, such as llama-cpp-python's with logits_all"
)


_A = TypeVar("_A")
_T = TypeVar("_T")
# What reads the wanted part of an answer, or raises an error.
Check = Callable[[PromptTokens], _T]


class UnaskableError(ValueError):
    """A prompt that cannot be asked for, which no further answer will change."""


class Refused(Unscored):
    """Losses of a prompt that the server finds wrong, as it does of one that is too long."""


@dataclass(frozen=True)
class Form:
    """A dialect, and how a prompt is given: as ids, or as text behind a text for the start token.

    That text is empty where the server puts its start token itself. `first` has the losses of first
    tokens, by text, where the server keeps them to itself. A server may put a space before a text;
    then one is trimmed that the tokenizer has put.
    """

    dialect: Dialect
    lead: str | None = None
    first: Mapping[str, float] = field(default_factory=dict)
    is_trimmed: bool = False

    def with_first(self, losses: LossArray, text: str) -> LossArray:
        """Complete the losses of all tokens behind the start token; `text` is the first one's.

        A ValueError where the server tells another loss of it: llama-cpp-python has those of the
        next tokens, all through, if the start token is not its model's BOS token.
        """
        told, known = losses[0], self.first.get(text, np.nan)
        if abs(told - known) > _SAME_NATS:
            raise ValueError(
                f"the first token's loss is {told:.3f} and, behind the start token, {known:.3f}: "
                "the losses are of other tokens, as with a start token that is not the model's BOS"
            )
        losses[0] = known if np.isnan(told) else told
        return losses

    def __str__(self) -> str:
        return f"{self.dialect.name}, {'ids' if self.lead is None else 'text'}"


class Served:
    """A model that a server has under a name, and the form in which it is asked, once it is found.

    The start token has a text, and so many words may follow it, one of them with a space before it.
    """

    form: Form

    def __init__(
        self, server: Server, model: str, start: str, vocabulary: int, puts_space: bool = False
    ):
        self._server, self._model = server, model
        self._start, self._vocabulary, self._puts_space = start, vocabulary, puts_space
        self.meter = _Meter(server)

    def find_form(self, dialects: Iterable[Dialect]) -> None:
        """Ask for a short prompt in every way, and keep to the first that works."""

        async def find() -> None:
            reasons = {}
            async with self._server.connected() as client:
                for dialect in dialects:
                    async for form in self._forms(client, dialect):
                        self.form = form
                        try:
                            found = await self.probe(client)
                        except ConnectionError:
                            raise
                        except (OSError, ValueError) as error:
                            found = Unscored(str(error))
                        if isinstance(found, Unscored):
                            reasons[dialect.name] = found.reason
                        elif np.ptp(found):
                            return
                        else:
                            reasons[dialect.name] = "all losses are the same"
            url, shown = self._server.url, "; ".join(": ".join(one) for one in reasons.items())
            raise ValueError(f"--server {url} gives no losses of a prompt ({shown}): {_KINDS}")

        asyncio.run(find())

    async def _forms(self, client: httpx.AsyncClient, dialect: Dialect) -> AsyncIterator[Form]:
        """Yield the ways to ask in a dialect, the most exact first."""
        yield Form(dialect)
        forms = [Form(dialect, self._start)]
        if isinstance(dialect, OpenAIDialect):
            body = dialect.request_first(self._model, self._start, self._vocabulary)
            with suppress(OSError, *MALFORMED):
                answer = await self._server.ask(client, dialect.path, body, PROBED)
                forms = [Form(dialect, self._start, dialect.read_first(answer))]
        for form in (*forms, Form(dialect, "")):
            yield form
            if self._puts_space:
                yield replace(form, is_trimmed=True)

    @property
    def about(self) -> dict[str, object]:
        """Say in a store how it was made; the server's weights and their dtype are not known."""
        return {
            "engine": "served",
            "server": self._server.host,
            "served_model": self._model,
            "dialect": str(self.form),
            "dtype": None,
            "teacher_revision": None,
        }

    def expect(self, documents: int, requests: float, tokens: str) -> None:
        """Tell how much is to be done."""
        self.meter.expected = round(requests)
        logger.info(
            "%s at %s (%s): %s documents, %s, about %s requests, %d at once",
            *(self._model, self._server.url, self.form, f"{documents:,}", tokens),
            *(f"{requests:,.0f}", self._server.concurrency),
        )

    def all_of(
        self, asked: Sequence[_A], one: Callable[[httpx.AsyncClient, _A], Awaitable[_T | Unscored]]
    ) -> list[_T | Unscored]:
        """Ask for all, so many at once."""

        async def together() -> list[_T | Unscored]:
            gate = asyncio.Semaphore(self._server.concurrency)
            async with self._server.connected() as client:

                async def in_turn(what: _A) -> _T | Unscored:
                    async with gate:
                        return await one(client, what)

                return list(await asyncio.gather(*map(in_turn, asked)))

        return asyncio.run(together())

    async def ask(
        self, client: httpx.AsyncClient, prompt: Prompt, check: Check[_T], times: int | None = None
    ) -> _T | Unscored:
        """Ask for a prompt, again where the answer is not what was asked for."""
        dialect, reason = self.form.dialect, ""
        body = dialect.request(self._model, prompt)
        for _ in range(_ASKED):
            try:
                answer = await self._server.ask(client, dialect.path, body, times)
            except RefusedRequestError as error:
                return Refused(f"the server answers {error}")
            try:
                return check(dialect.read(answer, prompt))
            except UnaskableError as error:
                return Unscored(str(error))
            except MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
        return Unscored(f"the server does not answer with its losses ({reason})")

    async def probe(self, client: httpx.AsyncClient) -> LossArray | Unscored:
        """Ask for a short prompt, with little patience."""
        raise NotImplementedError


class ServedScorer(Served):
    """Scores windows of a reader's tokens."""

    def __init__(self, server: Server, model: str, reader: Reader):
        tokenizer = reader.tokenizer
        spaced = decode_behind(reader, tokenizer.encode("a", add_special_tokens=False)) == " a"
        super().__init__(
            server, model, str(tokenizer.decode([reader.start])), len(tokenizer), spaced
        )
        self._reader = reader
        self._texts: dict[int, str] = {}

    @property
    def takes_ids(self) -> bool:
        """True where token ids are sent, and not text."""
        return self.form.lead is None

    def estimate(self, documents: int, sample: int, windows: Sequence[Window]) -> None:
        """Tell how much is to be done, by the windows of some of the documents."""
        share = documents / sample
        tokens = sum(len(window.ids) for window in windows)
        self.expect(documents, share * len(windows), f"about {share * tokens:,.0f} tokens")

    def losses(self, windows: Sequence[Window]) -> list[LossArray | Unscored]:
        """Return the losses of the scored tokens of each window, in nats; some may fail."""
        return self.all_of(windows, self._read)

    async def _read(self, client: httpx.AsyncClient, window: Window) -> LossArray | Unscored:
        found = await self.ask(client, self._prompt(window), partial(self._checked, window))
        self.meter.add()
        return found

    async def probe(self, client: httpx.AsyncClient) -> LossArray | Unscored:
        """Ask for the losses of a short text."""
        ids = encode(self._reader.tokenizer, PROBE).ids.tolist()[: self._reader.text_limit]
        window = Window(0, [self._reader.start, *ids], len(ids))
        check = partial(self._checked, window)
        return await self.ask(client, self._prompt(window), check, PROBED)

    def _prompt(self, window: Window) -> Prompt:
        if self.form.lead is None:
            return window.ids
        text = decode_behind(self._reader, window.ids[1:])
        return self.form.lead + text[self.form.is_trimmed and text.startswith(" ") :]

    def _checked(self, window: Window, found: PromptTokens) -> LossArray:
        """Return the losses of a window; a ValueError where they are not of its tokens."""
        count = len(window.ids)
        if len(found.losses) != count:
            raise ValueError(f"{len(found.losses)} tokens instead of {count}")
        for at in range(1, count):
            expected = window.ids[at]
            if found.ids and found.ids[at] != expected:
                raise ValueError(f"token {at} has id {found.ids[at]}, not {expected}")
            text = found.texts[at] if found.texts else None
            if text is None or found.ids:
                continue
            ours = self._text(expected)
            # Servers tell parts of a character in several ways.
            if PART not in ours and _visible(text) != _visible(ours):
                raise ValueError(f"token {at} is {text!r}, not {ours!r}")
        if not self.takes_ids:
            self._check_end(window)
        losses = np.array(found.losses[count - window.scored :], np.float32)
        if window.scored == count - 1:
            losses = self.form.with_first(losses, self._text(window.ids[1]))
        self.meter.tokens += len(losses)
        return numbers(losses)

    def _check_end(self, window: Window) -> None:
        """Reject a window that ends within a character, for which a text has U+FFFD."""
        text = decode_behind(self._reader, window.ids[1:])
        is_in_doubt = text.endswith(PART)
        if is_in_doubt and encode(self._reader.tokenizer, text).ids[-1] != window.ids[-1]:
            raise UnaskableError("a window of it ends within a character, which no text can tell")

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = decode_behind(self._reader, [token])
        return self._texts[token]


def decode_behind(reader: Reader, ids: Sequence[int]) -> str:
    """Return the text of tokens behind the start token: alone, decoders trim their first space."""
    decode, start = reader.tokenizer.decode, reader.start
    return str(decode([start, *ids]))[len(decode([start])) :]


def numbers(losses: LossArray) -> LossArray:
    """Return losses that are numbers, all of them; a ValueError for others."""
    bad = np.flatnonzero(~(np.abs(losses) < _NO_NUMBER_NATS))
    if len(bad):
        raise ValueError(f"no loss of {len(bad)} tokens, the first of them number {bad[0] + 1}")
    return losses


def _visible(text: str) -> str:
    """Return what servers agree upon of a token: not its spaces, nor parts of a character."""
    return text.replace(PART, "").replace("\u2581", " ").strip()


class _Meter:
    """Tells the speed of a server, and the time that is left."""

    def __init__(self, server: Server):
        self._server = server
        self.expected = self.tokens = self._requests = 0
        self._started = self._told = time.monotonic()

    def add(self) -> None:
        """Count an answered request."""
        now = time.monotonic()
        self._requests += 1
        if self._requests == _FIRST or now - self._told >= _LOG_S:
            self._told, passed_s = now, now - self._started
            left = max(0, self.expected - self._requests)
            logger.info(
                "%s of about %s requests, %s tokens per second, %s left, %s sent again",
                *(f"{self._requests:,}", f"{self.expected:,}", f"{self.tokens / passed_s:,.0f}"),
                *(duration(left * passed_s / self._requests), f"{self._server.asked_again:,}"),
            )
