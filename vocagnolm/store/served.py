"""Losses from a teacher behind a server, by one of the `apis`.

The teacher's tokenizer is local, so windows are the same as for a local teacher. Answers are
compared with the request: its tokens, and a finite loss for each.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import os
import random
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from vocagnolm.readers import Reader
from vocagnolm.shell.io import JsonObject
from vocagnolm.spans import encode
from vocagnolm.store.apis import APIS, Prompt, completion
from vocagnolm.store.format import PROBE_LOSSES, LossArray, read_manifest
from vocagnolm.store.windows import Report, Window
from vocagnolm.tokenizer import PROBE

if TYPE_CHECKING:
    import httpx

API_KEY = "VOCAGNOLM_API_KEY"
# The waits before a request is sent again. Together they are five minutes, which a server may need
# to start.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
# The first is the time limit for connecting, in seconds. The second is the limit for an answer, and
# for a wait that a server asks for.
_CONNECT_S, _LONGEST_S = 10.0, 600.0
# The first statuses mean that the request itself is wrong, for example too long. The second mean
# that the server is busy.
_REJECTED, _BUSY = (400, 413, 422), (408, 425, 429)
# There are fewer retries while an API is looked for, because another kind of server may fail.
_PROBE_RETRIES = 4
# A prompt is sent this many times if answers are malformed or for other tokens.
_ATTEMPTS = 5
# Errors that reading a malformed answer raises.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
# Decoders write this for a part of a character.
_PARTIAL_CHARACTER = "\ufffd"
# Two values of one loss from two batches are closer than this. Those of other tokens are further
# apart.
_MAX_DIFFERENCE_NATS = 0.5
# vLLM writes this for minus infinity.
_NO_LOSS_NATS = 9999.0
# The ending of a file of answers for a shard that is not written yet.
_ANSWERS_SUFFIX = ".answers"


class ServedScorer:
    """Scores windows of a reader's tokens with a named model on a server.

    The server's key is read from the environment. It is neither logged nor sent to another host.
    """

    def __init__(
        self, url: str, model: str, reader: Reader, concurrency: int, option: str = "--server"
    ):
        # A key in the address would get into logs and manifests, so it is rejected.
        if not re.fullmatch(r"https?://[^@?]+", url):
            raise ValueError(f"{option} must be http://HOST:PORT, and its key in {API_KEY}")
        self._option = option
        # People copy the address of an OpenAI client, which ends in /v1. The paths here begin with
        # it.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._reader = reader
        self.concurrency = concurrency
        self._key = os.environ.get(API_KEY, "").strip()
        self.api = APIS[0]
        self._retries = len(WAITS_S)
        self._start = str(reader.tokenizer.decode([reader.start]))
        # Losses of first tokens by their texts, for a server that hides them.
        self._first: dict[str, float] = {}
        # Losses of the test prompt, by which another model under the same name is recognized.
        self._probe_losses: list[float] = []

    @property
    def about(self) -> dict[str, object]:
        """Describe how a store was made. The server's weights and their dtype are unknown."""
        return {
            "engine": "served",
            "server": self._url,
            "served_model": self._model,
            "api": self.api.name,
            "dtype": None,
            "teacher_revision": None,
            PROBE_LOSSES: self._probe_losses,
        }

    def find_api(self, name: str | None = None) -> tuple[str, dict[str, float]]:
        """Try the API with that name, or each API, on a short prompt; keep the first that works.

        Returns the result for `adopt` in the other processes of a job.

        Raises:
            ValueError: no API gives the losses of a prompt, or the same prompt gets other losses
                when it is sent again.
        """
        ids = encode(self._reader.tokenizer, PROBE).ids.tolist()[: self._reader.text_limit]
        # Every token of the probe is scored, so the answer is checked from the first one on.
        window = Window(0, [self._reader.start] + ids, len(ids))
        reasons = []
        self._retries = _PROBE_RETRIES
        # `_probe` uses the API that `self.api` names at the time.
        for self.api in [api for api in APIS if name in (None, api.name)]:
            losses = asyncio.run(self._probe(window))
            if not isinstance(losses, str):
                self._check_repeated(losses, asyncio.run(self._probe(window)))
                self._retries = len(WAITS_S)
                self._probe_losses = [round(float(loss), 4) for loss in losses]
                return self.api.name, self._first
            reasons.append(f"{self.api.name}: {losses}")
        raise ValueError(
            f"{self._option} {self._url} returns no losses for a prompt ({'; '.join(reasons)}): "
            "serve the teacher with vLLM, SGLang, or llama-cpp-python with logits_all, or use a "
            "host whose completions accept ids, echo and logprobs"
        )

    def adopt(self, api_and_losses: tuple[str, dict[str, float]]) -> None:
        """Take over the result of `find_api` in another process."""
        name, self._first = api_and_losses
        (self.api,) = [api for api in APIS if api.name == name]

    def check_model(self, directory: Path, option: str = "--output_dir") -> None:
        """Raise a ValueError if a store has losses of another model that had the same name."""
        losses = read_manifest(directory).get(PROBE_LOSSES)
        if not losses or len(losses) != len(self._probe_losses):
            return
        at = _place_of_difference(losses, self._probe_losses)
        if at is not None:
            raise ValueError(
                f"{option} {directory} holds another model's losses: token {at + 1} of a test "
                f"prompt had {losses[at]:.3f} nats, and {self._url} gives "
                f"{self._probe_losses[at]:.3f}: serve the same model, or give another directory"
            )

    def _check_repeated(self, losses: LossArray, again: LossArray | str) -> None:
        """Raise a ValueError if a prompt gets other losses than a moment ago."""
        if isinstance(again, str):
            raise ValueError(f"{self._option} {self._url} answered once, but not again: {again}")
        at = _place_of_difference(losses, again)
        # Several models or precisions may have the same name.
        if at is not None:
            raise ValueError(
                f"{self._option} {self._url} gives the same prompt different losses when it is "
                f"asked again: token {at + 1} of {len(losses)} has {losses[at]:.3f} nats, and then "
                f"{again[at]:.3f}; they may differ by {_MAX_DIFFERENCE_NATS}: serve one model in "
                "one precision under this name"
            )

    async def _probe(self, window: Window) -> LossArray | str:
        """Return the losses by this API, or why it gives none."""
        async with self.connect() as http:
            try:
                if not self.api.takes_ids:
                    # llama.cpp hides the loss of a prompt's first token. So send the start token
                    # alone, and ask once for the losses of all tokens that may follow it.
                    size = len(self._reader.tokenizer)
                    body = completion(self._model, self._start, logprobs=size)
                    answer = await self._post(http, body)
                    if isinstance(answer, str):
                        return answer
                    followers = answer["choices"][0]["logprobs"]["top_logprobs"][0]
                    self._first = {}
                    for text, logprob in followers.items():
                        # Parts of characters all have the same text, nothing or U+FFFD, so the text
                        # does not say which part it is.
                        if text.strip(_PARTIAL_CHARACTER):
                            self._first[text] = -float(logprob)
                losses = await self.ask(http, window)
                # A server may accept the request, but answer with one constant for all tokens.
                if not isinstance(losses, str) and not np.ptp(losses):
                    return "all losses are the same"
                return losses
            except (OSError,) + _MALFORMED as error:
                return str(error)

    def losses(
        self, windows: Sequence[Window], shard: Path, report: Report | None = None
    ) -> list[LossArray | str]:
        """Return the losses of the scored tokens of each window, in nats, or why it has none.

        `report` is called with the number of tokens after every window.

        Answers are written at once to a file next to their shard, so a killed process's requests
        are not repeated.
        """
        earlier_answers = read_answers(shard)
        with new_answers(shard).open("wb") as file:
            return asyncio.run(self._ask_all(windows, earlier_answers, file, report))

    async def _ask_all(
        self,
        windows: Sequence[Window],
        earlier_answers: dict[bytes, LossArray],
        file: BinaryIO,
        report: Report | None,
    ) -> list[LossArray | str]:
        # All windows are begun at once, but only a limited number is sent at a time.
        gate = asyncio.Semaphore(self.concurrency)
        async with self.connect() as http:

            async def ask(window: Window) -> LossArray | str:
                async with gate:
                    losses = await self.ask_once(http, window, earlier_answers, file)
                if report:
                    report(window.scored)
                return losses

            # The answers are in the order of the windows, whichever came first.
            return await asyncio.gather(*map(ask, windows))

    async def ask_once(
        self,
        http: httpx.AsyncClient,
        window: Window,
        earlier_answers: dict[bytes, LossArray],
        file: BinaryIO,
    ) -> LossArray | str:
        """Ask for a window that was not answered earlier, and write its losses to a file."""
        # The key includes everything that determines an answer. It is used again only if the same
        # API of a model with the same name is asked for the same tokens.
        question = f"{self._model} {self.api.name} {window.ids} {window.scored}"
        key = hashlib.sha256(question.encode()).hexdigest().encode()
        if key in earlier_answers:
            return earlier_answers[key]
        losses = await self.ask(http, window)
        # No other window runs between two awaits, so lines cannot mix. A failed window is not
        # written, and is asked for again next time.
        if not isinstance(losses, str):
            file.write(key + b" " + base64.b64encode(losses.tobytes()) + b"\n")
            file.flush()
        return losses

    async def ask(self, http: httpx.AsyncClient, window: Window) -> LossArray | str:
        """Ask for a window, again if the answer is for other tokens.

        Returns its losses in nats, or why it has none. An OSError means that the server does not
        answer. A ValueError means that it does not know the path, the model or the key, or that it
        redirects.
        """
        prompt: Prompt = window.ids
        if not self.api.takes_ids:
            text = self._decode(window.ids[1:])
            # U+FFFD at the end is either in the document itself, or stands for part of a character.
            # In the first case the text has the same last token again, and in the second another
            # one.
            if text.endswith(_PARTIAL_CHARACTER):
                last_token = encode(self._reader.tokenizer, text).ids[-1]
                if last_token != window.ids[-1]:
                    return "a window of it ends within a character, which no text can express"
            prompt = self._start + text
        body = self.api.request(self._model, prompt)
        reason = ""
        # A wrong answer may be an accident of one request, so send the prompt again. A server that
        # answers wrongly every time does not have the teacher's tokens.
        for _ in range(_ATTEMPTS):
            answer = await self._post(http, body)
            if isinstance(answer, str):
                return answer
            try:
                return self._checked(window, *self.api.read(answer))
            except _MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
        return f"the server does not answer with its losses ({reason})"

    def connect(self) -> httpx.AsyncClient:
        """Return a client for `ask`."""
        import httpx

        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(_LONGEST_S, connect=_CONNECT_S, pool=None),
            # The client has no limit of its own, because `_ask_all` limits the requests.
            limits=httpx.Limits(),
        )

    async def _post(self, http: httpx.AsyncClient, body: JsonObject) -> JsonObject | str:
        """Return the answer to a request, or why the server rejects it.

        If all attempts fail, an OSError is raised. If the server does not know the path, the model
        or the key, or redirects, a ValueError is raised.
        """
        import httpx

        # An attempt ends in one of four ways: a return with the answer or the reason, a ValueError
        # that no further attempt would change, or a wait and the next attempt.
        waits_s = WAITS_S[: self._retries]
        for attempt in range(len(waits_s) + 1):
            retry_after_s = 0.0
            try:
                response = await http.post(self._url + self.api.path, json=body)
            except httpx.RequestError as error:
                reason = f"{type(error).__name__} {error}"
            else:
                status = response.status_code
                # Some servers repeat the key that they reject, and the reason may be logged.
                text = response.text.replace(self._key, "***") if self._key else response.text
                reason = " ".join(f"{status} {response.reason_phrase} {text[:200]}".split())
                if status in _REJECTED:
                    return f"the server answers {reason}"
                # A busy server may say how long to wait, in seconds or as a date. A date is
                # ignored.
                if status >= 500 or status in _BUSY:
                    retry_after = response.headers.get("retry-after", "")
                    if retry_after.isdigit():
                        retry_after_s = min(float(retry_after), _LONGEST_S)
                elif not response.is_success:
                    raise ValueError(f"{self._option} {self._url}{self.api.path} answers {reason}")
                else:
                    # A proxy may cut off an answer, or replace it by a page of its own.
                    with suppress(ValueError):
                        answer = response.json()
                        if isinstance(answer, dict):
                            return answer
                    reason = f"an answer that is cut, or not a JSON object: {reason}"
            if attempt < len(waits_s):
                # The wait is partly random. Otherwise requests that failed together would come back
                # together, and fail again.
                wait_s = waits_s[attempt] * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(retry_after_s, wait_s))
        raise OSError(
            f"{self._option} {self._url} has failed {len(waits_s) + 1} times, the last time "
            f"with {reason}: check it, and give the same command again to continue"
        )

    def _checked(
        self, window: Window, logprobs: list[float | None], tokens: list[int | str | None]
    ) -> LossArray:
        """Return the losses of a window. If they are for other tokens, a ValueError is raised."""
        count = len(window.ids)
        if not len(logprobs) == len(tokens) == count:
            raise ValueError(f"{len(logprobs)} tokens instead of {count}")
        # NumPy makes NaN of None, which is left only if a token has no loss.
        losses = -np.array(logprobs, np.float64)
        # The start token at 0 is not scored, and servers give different values for it.
        for at in range(1, count):
            if not self._is_same(window.ids[at], tokens[at]):
                raise ValueError(f"token {at} is {tokens[at]!r}, not {window.ids[at]}")
        # Only the first window of a document scores the token after the start token.
        if not self.api.takes_ids and window.scored == count - 1:
            first_loss = losses[1]
            probed_loss = self._first.get(self._decode([window.ids[1]]), math.nan)
            # llama-cpp-python shifts losses by one if the start token is not the model's BOS. A
            # comparison with NaN is false, so a missing value passes.
            if abs(first_loss - probed_loss) > _MAX_DIFFERENCE_NATS:
                raise ValueError(
                    f"the first token's loss is {first_loss:.3f}, and after the start token "
                    f"{probed_loss:.3f}: is the start token the model's BOS token?"
                )
            losses[1] = probed_loss if math.isnan(first_loss) else first_loss
        scored = losses[count - window.scored :].astype(np.float32)
        # NaN is not below the bound either, so one test finds everything that is no loss.
        if not (np.abs(scored) < _NO_LOSS_NATS).all():
            raise ValueError("a token without a finite loss")
        return scored

    def _is_same(self, token_id: int, served_token: int | str | None) -> bool:
        # Even an API that takes ids may name tokens by text.
        if self.api.takes_ids and not isinstance(served_token, str):
            return served_token == token_id
        # Servers write parts of a character in different ways, and some drop spaces.
        text = self._decode([token_id]).replace("\u2581", " ").strip()
        served_text = str(served_token).replace("\u2581", " ").strip()
        return _PARTIAL_CHARACTER in text or served_text == text

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode tokens after the start token. Without one, decoders strip their first space."""
        ids_with_start = [self._reader.start]
        ids_with_start += ids
        return str(self._reader.tokenizer.decode(ids_with_start))[len(self._start) :]


def _place_of_difference(losses: npt.ArrayLike, again: npt.ArrayLike) -> int | None:
    """Return the token whose losses differ most, or None if they differ only by rounding."""
    differences = np.abs(np.subtract(losses, again))
    at = int(differences.argmax())
    return at if differences[at] > _MAX_DIFFERENCE_NATS else None


# -- Answers for a shard that is not written yet -----------------------------------------------


def answer_files(shard: Path) -> list[Path]:
    """List the files of answers for a shard, one for each process that has asked."""
    return list(shard.parent.glob(f".{shard.name}.*{_ANSWERS_SUFFIX}"))


def new_answers(shard: Path) -> Path:
    """Name a file of answers for a shard."""
    # Each process has its own file, so only a last line can be cut off.
    return shard.with_name(f".{shard.name}.{uuid.uuid4().hex}{_ANSWERS_SUFFIX}")


def read_answers(shard: Path) -> dict[bytes, LossArray]:
    """Read the answers to killed processes. A line is a hash of the request, and losses."""
    answers = {}
    for path in answer_files(shard):
        # Another job may just have written the shard and deleted the answers. A line that was cut
        # off has no line break, and does not match.
        with suppress(FileNotFoundError):
            for key, losses in re.findall(rb"([0-9a-f]{64}) ([\w+/=]+)\n", path.read_bytes()):
                answers[key] = np.frombuffer(base64.b64decode(losses), np.float32)
    return answers
