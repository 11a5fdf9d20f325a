"""Losses from a teacher that a server runs: vLLM, SGLang, or completions that echo a prompt.

The teacher's tokenizer is local, so windows are the same as for a local teacher, and requests have
token ids. Answers are compared with the request: its tokens, and a finite loss for each.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import random
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from vocagnolm.fields import OptionError
from vocagnolm.readers import Reader
from vocagnolm.shell.io import JsonObject
from vocagnolm.spans import encode
from vocagnolm.store.format import LossArray
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
# vLLM writes this for minus infinity.
_NO_LOSS_NATS = 9999.0
# The ending of a file of answers for a shard that is not written yet.
_ANSWERS_SUFFIX = ".answers"


# -- The kinds of servers ----------------------------------------------------------------------

# An answer has the logprobs of N tokens, or None, and their ids or texts. The start token is the
# first.
Answer = tuple[list[float | None], list[int | str | None]]


class Api(NamedTuple):
    """How one kind of server is asked for the losses of a prompt's tokens."""

    name: str
    path: str
    request: Callable[[str, list[int]], JsonObject]
    read: Callable[[JsonObject], Answer]


def _request_completion(model: str, ids: list[int], **options: object) -> JsonObject:
    # Ask for one new token and ignore it, because vLLM rejects 0.
    return {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, **options}


def _read_vllm(answer: JsonObject) -> Answer:
    # The list has null for the first token, and {id: {logprob, rank, decoded_token}} for each
    # other: first the prompt's token, then as many of the likeliest as were asked for. See
    # vllm/entrypoints/openai/completion/protocol.py.
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    logprobs: list[float | None] = [None]
    tokens: list[int | str | None] = [None]
    for row in rows:
        token, description = next(iter(row.items()))
        logprobs.append(description["logprob"])
        tokens.append(int(token))
    return logprobs, tokens


def _request_sglang(model: str, ids: list[int]) -> JsonObject:
    # This server has only one model.
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


def _read_sglang(answer: JsonObject) -> Answer:
    # [logprob, id, text] of every token; see sglang/srt/managers/io_struct.py.
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    logprobs: list[float | None] = [None]
    tokens: list[int | str | None] = [None]
    for logprob, token, *_ in rows:
        logprobs.append(logprob)
        tokens.append(int(token))
    return logprobs, tokens


def _read_echo(answer: JsonObject) -> Answer:
    # The lists have the prompt's tokens and then the new one, like OpenAI's completions. Together
    # returns the prompt's tokens in a separate list. Some servers return ids next to texts.
    part = (answer.get("prompt") or answer["choices"])[0]["logprobs"]
    tokens = part.get("token_ids") or part["tokens"]
    count = answer["usage"]["prompt_tokens"]
    return part["token_logprobs"][:count], tokens[:count]


# APIs are tried in this order. The one that echoes the prompt is the last, because its answers
# usually name tokens by text, and ids are compared exactly.
_APIS = (
    Api("vllm", "/v1/completions", partial(_request_completion, prompt_logprobs=0), _read_vllm),
    Api("sglang", "/generate", _request_sglang, _read_sglang),
    Api("echo", "/v1/completions", partial(_request_completion, echo=True, logprobs=1), _read_echo),
)


# -- Requests ----------------------------------------------------------------------------------


class ServerScorer:
    """Scores windows of a reader's tokens with a named model on a server.

    The server's key is read from the environment. It is neither logged nor sent to another host.
    """

    def __init__(self, url: str, model: str, reader: Reader, concurrency: int):
        # A key in the address would get into logs and manifests, so it is rejected.
        if not re.fullmatch(r"https?://[^@?]+", url):
            raise OptionError("server", f"must be http://HOST:PORT, and its key in {API_KEY}")
        # People copy the address of an OpenAI client, which ends in /v1. The paths here begin with
        # it.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._reader = reader
        self._concurrency = concurrency
        self._key = os.environ.get(API_KEY, "").strip()
        self._api = _APIS[0]
        self._waits_s: Sequence[float] = WAITS_S

    @property
    def about(self) -> dict[str, object]:
        """Describe how a store was made. The server's weights and their dtype are unknown."""
        return {
            "engine": "served",
            "server": self._url,
            "served_model": self._model,
            "api": self._api.name,
            "dtype": None,
            "teacher_revision": None,
        }

    def find_api(self, name: str | None = None) -> None:
        """Try the API with that name, or each API, on a short prompt; keep the first that works.

        Raises:
            ValueError: no API gives the losses of a prompt.
        """
        ids = encode(self._reader.tokenizer, PROBE).ids.tolist()[: self._reader.text_limit]
        # Every token of the probe is scored, so the answer is checked from the first one on.
        window = Window(0, [self._reader.start] + ids, len(ids))
        reasons = []
        self._waits_s = WAITS_S[:_PROBE_RETRIES]
        for api in _APIS:
            if name not in (None, api.name):
                continue
            self._api = api
            reason = asyncio.run(self._try_api(window))
            if reason is None:
                self._waits_s = WAITS_S
                return
            reasons.append(f"{api.name}: {reason}")
        raise OptionError(
            "server",
            f"{self._url} returns no losses for a prompt ({'; '.join(reasons)}): serve "
            "the teacher with vLLM or SGLang, or use a host whose completions accept ids, echo and "
            "logprobs",
        )

    async def _try_api(self, window: Window) -> str | None:
        """Return why the server gives no losses by this API, or None if it gives them."""
        async with self._connect() as http:
            try:
                losses = await self._ask(http, window)
            except (OSError, ValueError) as error:
                return str(error)
        # A server may accept the request, but answer with one constant for all tokens.
        if not isinstance(losses, str):
            return None if np.ptp(losses) else "all losses are the same"
        return losses

    def losses(
        self, windows: Sequence[Window], shard: Path, report: Report | None = None
    ) -> list[LossArray | str]:
        """Return the losses of the scored tokens of each window, in nats, or why it has none.

        `report` is called with the number of tokens after every window.

        Answers are written at once to a file next to their shard, so a killed process's requests
        are not repeated.
        """
        earlier_answers = _read_answers(shard)
        # Each process has its own file, so only a last line can be cut off.
        path = shard.with_name(f".{shard.name}.{uuid.uuid4().hex}{_ANSWERS_SUFFIX}")
        with path.open("wb") as file:
            return asyncio.run(self._ask_all(windows, earlier_answers, file, report))

    async def _ask_all(
        self,
        windows: Sequence[Window],
        earlier_answers: dict[bytes, LossArray],
        file: BinaryIO,
        report: Report | None,
    ) -> list[LossArray | str]:
        # All windows are begun at once, but only a limited number is sent at a time.
        gate = asyncio.Semaphore(self._concurrency)
        async with self._connect() as http:

            async def ask(window: Window) -> LossArray | str:
                async with gate:
                    losses = await self._ask_once(http, window, earlier_answers, file)
                if report:
                    report(window.scored)
                return losses

            # The answers are in the order of the windows, whichever came first.
            return await asyncio.gather(*map(ask, windows))

    async def _ask_once(
        self,
        http: httpx.AsyncClient,
        window: Window,
        earlier_answers: dict[bytes, LossArray],
        file: BinaryIO,
    ) -> LossArray | str:
        """Ask for a window that was not answered earlier, and write its losses to a file."""
        # The key includes everything that determines an answer. It is used again only if the same
        # API of a model with the same name is asked for the same tokens.
        question = f"{self._model} {self._api.name} {window.ids} {window.scored}"
        key = hashlib.sha256(question.encode()).hexdigest().encode()
        if key in earlier_answers:
            return earlier_answers[key]
        losses = await self._ask(http, window)
        # No other window runs between two awaits, so lines cannot mix. A failed window is not
        # written, and is asked for again next time.
        if not isinstance(losses, str):
            file.write(key + b" " + base64.b64encode(losses.tobytes()) + b"\n")
            file.flush()
        return losses

    async def _ask(self, http: httpx.AsyncClient, window: Window) -> LossArray | str:
        """Ask for a window, again if the answer is for other tokens.

        Returns its losses in nats, or why it has none. An OSError means that the server does not
        answer. A ValueError means that it does not know the path, the model or the key, or that it
        redirects.
        """
        body = self._api.request(self._model, window.ids)
        reason = ""
        # A wrong answer may be an accident of one request, so send the prompt again. A server that
        # answers wrongly every time does not have the teacher's tokens.
        for _ in range(_ATTEMPTS):
            answer = await self._post(http, body)
            if isinstance(answer, str):
                return answer
            try:
                return self._checked(window, *self._api.read(answer))
            except _MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
        return f"the server does not answer with its losses ({reason})"

    def _connect(self) -> httpx.AsyncClient:
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
        for attempt in range(len(self._waits_s) + 1):
            retry_after_s = 0.0
            try:
                response = await http.post(self._url + self._api.path, json=body)
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
                    raise OptionError("server", f"{self._url}{self._api.path} answers {reason}")
                else:
                    # A proxy may cut off an answer, or replace it by a page of its own.
                    with suppress(ValueError):
                        answer = response.json()
                        if isinstance(answer, dict):
                            return answer
                    reason = f"an answer that is cut, or not a JSON object: {reason}"
            if attempt < len(self._waits_s):
                # The wait is partly random. Otherwise requests that failed together would come back
                # together, and fail again.
                wait_s = self._waits_s[attempt] * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(retry_after_s, wait_s))
        raise OSError(
            f"--server {self._url} has failed {len(self._waits_s) + 1} times, the last time with "
            f"{reason}: check it, and give the same command again to continue"
        )

    def _checked(
        self, window: Window, logprobs: list[float | None], tokens: list[int | str | None]
    ) -> LossArray:
        """Return the losses of a window. If they are for other tokens, a ValueError is raised."""
        count = len(window.ids)
        if not len(logprobs) == len(tokens) == count:
            raise ValueError(f"{len(logprobs)} tokens instead of {count}")
        # The start token at 0 is not scored, and servers give different values for it.
        for at in range(1, count):
            if not self._is_same(window.ids[at], tokens[at]):
                raise ValueError(f"token {at} is {tokens[at]!r}, not {window.ids[at]}")
        # NumPy makes NaN of None, which is left only if a token has no loss.
        losses = -np.array(logprobs[count - window.scored :], np.float64)
        # NaN is not below the bound either, so one test finds everything that is no loss.
        if not (np.abs(losses) < _NO_LOSS_NATS).all():
            raise ValueError("a token without a finite loss")
        return losses.astype(np.float32)

    def _is_same(self, token_id: int, served_token: int | str | None) -> bool:
        if not isinstance(served_token, str):
            return served_token == token_id
        # Servers write parts of a character in different ways, and some drop spaces.
        text = str(self._reader.tokenizer.decode([token_id]))
        served_text = served_token.replace("\u2581", " ").strip()
        return _PARTIAL_CHARACTER in text or served_text == text.replace("\u2581", " ").strip()


# -- Answers for a shard that is not written yet -----------------------------------------------


def answer_files(shard: Path) -> list[Path]:
    """List the files of answers for a shard, one for each process that has asked."""
    return list(shard.parent.glob(f".{shard.name}.*{_ANSWERS_SUFFIX}"))


def _read_answers(shard: Path) -> dict[bytes, LossArray]:
    """Read the answers to killed processes. A line is a hash of the request, and losses."""
    answers = {}
    for path in answer_files(shard):
        # Another job may just have written the shard and deleted the answers. A line that was cut
        # off has no line break, and does not match.
        with suppress(FileNotFoundError):
            for key, losses in re.findall(rb"([0-9a-f]{64}) ([\w+/=]+)\n", path.read_bytes()):
                answers[key] = np.frombuffer(base64.b64decode(losses), np.float32)
    return answers
