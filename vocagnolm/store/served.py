"""Losses from a teacher behind a server: vLLM, SGLang, or llama.cpp by llama-cpp-python.

The teacher's tokenizer is here, so windows are those of a teacher that is loaded here. What comes
back is checked against what was asked for: its tokens, and a finite loss of each.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from vocagnolm.io import JsonObject
from vocagnolm.readers import Reader
from vocagnolm.spans import encode
from vocagnolm.store.format import LossArray
from vocagnolm.store.windows import Report, Window
from vocagnolm.tokenizer import PROBE

if TYPE_CHECKING:
    import httpx

Prompt = list[int] | str

API_KEY = "VOCAGNOLM_API_KEY"
# The waits before a request is sent again. Together they are five minutes, which a server may take
# to start.
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0)
# The first is the most seconds to connect in. The second is the most for an answer, and the most
# that a server may ask us to wait.
_CONNECT_S, _LONGEST_S = 10.0, 600.0
# The first statuses say that a request is wrong in itself, such as a too long one; the second,
# that the server is busy.
_REJECTED, _BUSY = (400, 413, 422), (408, 425, 429)
# There are fewer retries while an API is looked for: a server of another kind may fail at this
# one.
_PROBE_RETRIES = 4
# A prompt is sent this many times while the answers are malformed or of other tokens.
_ATTEMPTS = 5
# These errors are raised where a malformed answer is read.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
# Decoders write this for a part of a character.
_PARTIAL_CHARACTER = "\ufffd"
# Two values of one loss, from two batches, are closer; those of other tokens are further apart.
_MAX_DIFFERENCE_NATS = 0.5
# vLLM writes this for minus infinity.
_NO_LOSS_NATS = 9999.0
# The name of a file of answers, for a shard that is not written yet, ends so.
_ANSWERS_SUFFIX = ".answers"


# -- Three APIs --------------------------------------------------------------------------------

# An answer is the logprobs of N tokens, None where there is none, and their ids or texts. The
# start token is the first.
Answer = tuple[list[float | None], list[int | str | None]]


class Api(NamedTuple):
    """How one kind of server is asked for the losses of a prompt's tokens."""

    name: str
    path: str
    request: Callable[[str, Prompt], JsonObject]
    read: Callable[[JsonObject], Answer]
    takes_ids: bool = True


def _completion(model: str, prompt: Prompt, **options: object) -> JsonObject:
    # One new token is asked for and ignored: llama-cpp-python takes 0 for "as many as fit".
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, **options}


def _read_vllm(answer: JsonObject) -> Answer:
    # The list has null for the first token, and for each other one {id: {logprob, rank,
    # decoded_token}}: the prompt's token first, then as many of the likeliest as were asked for.
    # See vllm/entrypoints/openai/completion/protocol.py.
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    logprobs: list[float | None] = [None]
    tokens: list[int | str | None] = [None]
    for row in rows:
        token, description = next(iter(row.items()))
        logprobs.append(description["logprob"])
        tokens.append(int(token))
    return logprobs, tokens


def _request_sglang(model: str, prompt: Prompt) -> JsonObject:
    # This server has one model only.
    return {
        "input_ids": prompt,
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


def _read_llama_cpp(answer: JsonObject) -> Answer:
    # The lists hold the tokens of the prompt and then the new one. The start token may be left out
    # of the lists though `prompt_tokens` counts it, and the first token in them has null; see
    # Llama._create_completion of llama-cpp-python.
    usage = answer["usage"]
    texts = answer["choices"][0]["logprobs"]["tokens"]
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(texts) != len(logprobs):
        raise ValueError(f"{len(texts)} tokens and {len(logprobs)} losses")
    if len(texts) - usage["completion_tokens"] == usage["prompt_tokens"] - 1:
        texts = [None] + texts
        logprobs = [None] + logprobs
    return logprobs[: usage["prompt_tokens"]], texts[: usage["prompt_tokens"]]


# APIs are tried in this order: those that take ids come first, as ids are checked exactly.
APIS = (
    Api("vllm", "/v1/completions", partial(_completion, prompt_logprobs=0), _read_vllm),
    Api("sglang", "/generate", _request_sglang, _read_sglang),
    Api(
        "llama.cpp",
        "/v1/completions",
        partial(_completion, echo=True, logprobs=0),
        _read_llama_cpp,
        takes_ids=False,
    ),
)


class ServedScorer:
    """Scores windows of a reader's tokens with the model that a server has under a name.

    The server's key is read from the environment; it is neither logged nor sent to another host.
    """

    def __init__(self, url: str, model: str, reader: Reader, concurrency: int):
        # A key in the address would get into logs and manifests, so that none is taken there.
        if not re.fullmatch(r"https?://[^@?]+", url):
            raise ValueError(f"--server must be http://HOST:PORT, and its key in {API_KEY}")
        # People copy the address of an OpenAI client, which ends in /v1; the paths here begin with
        # it.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._reader = reader
        self._concurrency = concurrency
        self._key = os.environ.get(API_KEY, "").strip()
        self.api = APIS[0]
        self._retries = len(WAITS_S)
        self._start = str(reader.tokenizer.decode([reader.start]))
        # These are losses of first tokens by their texts, for a server that hides them.
        self._first: dict[str, float] = {}

    @property
    def about(self) -> dict[str, object]:
        """Describe how a store was made; the server's weights and their dtype are not known."""
        return {
            "engine": "served",
            "server": self._url,
            "served_model": self._model,
            "api": self.api.name,
            "dtype": None,
            "teacher_revision": None,
        }

    def find_api(self, name: str | None = None) -> None:
        """Ask for a short prompt by the API of that name, or by each; keep the first that works."""
        ids = encode(self._reader.tokenizer, PROBE).ids.tolist()[: self._reader.text_limit]
        # Every token of the probe is scored, so that the answer is checked from the first one on.
        window = Window(0, [self._reader.start] + ids, len(ids))
        reasons = []
        self._retries = _PROBE_RETRIES
        # `_probe` asks by the API that `self.api` names at the time.
        for self.api in [api for api in APIS if name in (None, api.name)]:
            reason = asyncio.run(self._probe(window))
            if not reason:
                self._retries = len(WAITS_S)
                return
            reasons.append(f"{self.api.name}: {reason}")
        raise ValueError(
            f"--server {self._url} gives no losses of a prompt ({'; '.join(reasons)}): "
            "serve the teacher with vLLM, SGLang, or llama-cpp-python with logits_all"
        )

    async def _probe(self, window: Window) -> str:
        """Return why this API gives no losses; "" if it does."""
        async with self._connect() as http:
            try:
                if not self.api.takes_ids:
                    # llama.cpp hides the loss of a prompt's first token. A prompt that is the
                    # start token alone is asked once for the losses of all tokens that may follow
                    # it.
                    size = len(self._reader.tokenizer)
                    body = _completion(self._model, self._start, logprobs=size)
                    answer = await self._post(http, body)
                    if isinstance(answer, str):
                        return answer
                    followers = answer["choices"][0]["logprobs"]["top_logprobs"][0]
                    self._first = {}
                    for text, logprob in followers.items():
                        # Parts of characters all have the same text, nothing or U+FFFD, so that a
                        # text does not tell which of them it is.
                        if text.strip(_PARTIAL_CHARACTER):
                            self._first[text] = -float(logprob)
                losses = await self._ask(http, window)
                if isinstance(losses, str):
                    return losses
                # A server may take the request, and answer with one constant for all tokens.
                return "" if np.ptp(losses) else "all losses are the same"
            except (OSError,) + _MALFORMED as error:
                return str(error)

    def losses(
        self, windows: Sequence[Window], shard: Path, report: Report | None = None
    ) -> list[LossArray | str]:
        """Return the losses of the scored tokens of each window, in nats, or why it has none.

        `report` is called with the number of tokens after every window.

        As they come, they are written to a file next to the shard that they are for: what a killed
        process was answered is not asked for again.
        """
        # Each process has a file of its own, so that only a last line can be cut off.
        path = shard.with_name(f".{shard.name}.{uuid.uuid4().hex}{_ANSWERS_SUFFIX}")
        earlier_answers = _read_answers(shard)
        with path.open("wb") as file:
            return asyncio.run(self._ask_all(windows, earlier_answers, file, report))

    async def _ask_all(
        self,
        windows: Sequence[Window],
        earlier_answers: dict[bytes, LossArray],
        file: BinaryIO,
        report: Report | None,
    ) -> list[LossArray | str]:
        # All windows are begun at once, but only a limited number of them is with the server at a
        # time.
        gate = asyncio.Semaphore(self._concurrency)
        async with self._connect() as http:

            async def ask(window: Window) -> LossArray | str:
                # The key covers all that decides an answer, which is used again only where a model
                # of the same name is asked the same tokens by the same API.
                question = f"{self._model} {self.api.name} {window.ids} {window.scored}"
                key = hashlib.sha256(question.encode()).hexdigest().encode()
                if key in earlier_answers:
                    if report:
                        report(window.scored)
                    return earlier_answers[key]
                async with gate:
                    losses = await self._ask(http, window)
                # Between two awaits no other window runs, so that lines cannot mix. A window that
                # failed is not written, and is asked for again next time.
                if not isinstance(losses, str):
                    file.write(key + b" " + base64.b64encode(losses.tobytes()) + b"\n")
                    file.flush()
                if report:
                    report(window.scored)
                return losses

            # The answers are in the order of the windows, whichever came first.
            return await asyncio.gather(*map(ask, windows))

    async def _ask(self, http: httpx.AsyncClient, window: Window) -> LossArray | str:
        """Ask for a window, again where the answer is not of its tokens."""
        prompt: Prompt = window.ids
        if not self.api.takes_ids:
            text = self._decode(window.ids[1:])
            # U+FFFD at the end either is in the document itself, and then the text has the same
            # last token again, or stands for a part of a character, and then it has another one.
            if text.endswith(_PARTIAL_CHARACTER):
                last_token = encode(self._reader.tokenizer, text).ids[-1]
                if last_token != window.ids[-1]:
                    return "a window of it ends within a character, which no text can express"
            prompt = self._start + text
        body = self.api.request(self._model, prompt)
        reason = ""
        # A wrong answer may be an accident of one request, so that the prompt is sent again. A
        # server that answers wrongly every time does not have the teacher's tokens.
        for _ in range(_ATTEMPTS):
            answer = await self._post(http, body)
            if isinstance(answer, str):
                return answer
            try:
                return self._checked(window, *self.api.read(answer))
            except _MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
        return f"the server does not answer with its losses ({reason})"

    def _connect(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(_LONGEST_S, connect=_CONNECT_S, pool=None),
            # The client has no limit of its own: `_ask_all` bounds the requests.
            limits=httpx.Limits(),
        )

    async def _post(self, http: httpx.AsyncClient, body: JsonObject) -> JsonObject | str:
        """Return the answer to a request, or why the server finds it wrong.

        An OSError if all attempts fail. A ValueError where the server does not know the path, the
        model or the key, or redirects.
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
                # A busy server may say for how long it will be busy, in seconds or as a date; a
                # date is not read.
                if status >= 500 or status in _BUSY:
                    retry_after = response.headers.get("retry-after", "")
                    if retry_after.isdigit():
                        retry_after_s = min(float(retry_after), _LONGEST_S)
                elif not response.is_success:
                    raise ValueError(f"--server {self._url}{self.api.path} answers {reason}")
                else:
                    # A proxy may cut an answer off, or put a page of its own in its place.
                    with suppress(ValueError):
                        answer = response.json()
                        if isinstance(answer, dict):
                            return answer
                    reason = f"an answer that is cut, or not a JSON object: {reason}"
            if attempt < len(waits_s):
                # The wait is random in part: requests that failed together would otherwise come
                # back together, and fail again.
                wait_s = waits_s[attempt] * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(retry_after_s, wait_s))
        raise OSError(
            f"--server {self._url} has failed {len(waits_s) + 1} times, at last with {reason}: "
            "look at it, and give the same command again to continue"
        )

    def _checked(
        self, window: Window, logprobs: list[float | None], tokens: list[int | str | None]
    ) -> LossArray:
        """Return the losses of a window; a ValueError where they are not of its tokens."""
        count = len(window.ids)
        if not len(logprobs) == len(tokens) == count:
            raise ValueError(f"{len(logprobs)} tokens instead of {count}")
        # NumPy makes NaN of None, which is left only where a token has no loss.
        losses = -np.array(logprobs, np.float64)
        # The start token at 0 is not scored, and servers differ in what they say of it.
        for at in range(1, count):
            if not self._is_same(window.ids[at], tokens[at]):
                raise ValueError(f"token {at} is {tokens[at]!r}, not {window.ids[at]}")
        # Only the first window of a document scores the token after the start token.
        if not self.api.takes_ids and window.scored == count - 1:
            first_loss = losses[1]
            probed_loss = self._first.get(self._decode([window.ids[1]]), math.nan)
            # llama-cpp-python shifts losses by one where the start token is not the model's BOS. A
            # comparison with NaN is false, so that a missing value passes.
            if abs(first_loss - probed_loss) > _MAX_DIFFERENCE_NATS:
                raise ValueError(
                    f"the first token's loss is {first_loss:.3f}, and after the start token "
                    f"{probed_loss:.3f}: is the start token the model's BOS token?"
                )
            losses[1] = probed_loss if math.isnan(first_loss) else first_loss
        scored = losses[count - window.scored :].astype(np.float32)
        # NaN is not below the bound either, so that one test finds all that is not a loss.
        if not (np.abs(scored) < _NO_LOSS_NATS).all():
            raise ValueError("a token without a finite loss")
        return scored

    def _is_same(self, token_id: int, served_token: int | str | None) -> bool:
        if self.api.takes_ids:
            return served_token == token_id
        # Servers write parts of a character in several ways, and some drop spaces.
        text = self._decode([token_id]).replace("\u2581", " ").strip()
        served_text = str(served_token).replace("\u2581", " ").strip()
        return _PARTIAL_CHARACTER in text or served_text == text

    def _decode(self, ids: Sequence[int]) -> str:
        """Decode tokens after the start token: without one, decoders trim their first space."""
        ids_with_start = [self._reader.start]
        ids_with_start += ids
        return str(self._reader.tokenizer.decode(ids_with_start))[len(self._start) :]


# -- Answers for a shard that is not written yet -----------------------------------------------


def answer_files(shard: Path) -> list[Path]:
    """List the files of answers for a shard, one of each process that has asked."""
    return list(shard.parent.glob(f".{shard.name}.*{_ANSWERS_SUFFIX}"))


def _read_answers(shard: Path) -> dict[bytes, LossArray]:
    """Read what killed processes were answered: a line is a hash of what was asked, and losses."""
    answers = {}
    for path in answer_files(shard):
        # Another job may just have written the shard, and deleted the answers. A line that was cut
        # off lacks its line break, and does not match.
        with suppress(FileNotFoundError):
            for key, losses in re.findall(rb"([0-9a-f]{64}) ([\w+/=]+)\n", path.read_bytes()):
                answers[key] = np.frombuffer(base64.b64decode(losses), np.float32)
    return answers
