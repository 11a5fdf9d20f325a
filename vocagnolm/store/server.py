"""Losses from a teacher that a server runs: vLLM, SGLang, or completions that echo a prompt.

The teacher's tokenizer is local, so windows are the same as for a local teacher, and requests have
token ids. Answers are compared with the request: its tokens, and a finite loss for each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import NamedTuple

import numpy as np
import requests
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ContentDecodingError
from urllib3.util import Retry

from vocagnolm.fields import OptionError
from vocagnolm.readers import Reader
from vocagnolm.shell.io import JsonObject
from vocagnolm.spans import encode
from vocagnolm.store.format import LossArray
from vocagnolm.store.windows import Report, Window
from vocagnolm.tokenizer import PROBE

API_KEY = "VOCAGNOLM_API_KEY"
# A request is repeated if the server is busy, fails or does not answer, when the server asks for it
# or for about six minutes, which a server may need to start.
RETRIES = Retry(
    total=10,
    backoff_factor=0.5,
    status_forcelist=(408, 425, 429, *range(500, 600)),
    # By default, no POST is repeated, because a server might act twice.
    allowed_methods=None,
    raise_on_status=False,
)
# The time limits for connecting and for an answer, in seconds.
_TIMEOUT_S = (10.0, 600.0)
# These statuses mean that the request itself is wrong, for example too long.
_REJECTED = (400, 413, 422)
# A prompt is sent this many times if answers are malformed or for other tokens.
_ATTEMPTS = 5
# Errors that reading a malformed answer raises, or one that is cut off.
_MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ChunkedEncodingError,
    ContentDecodingError,
)
# Decoders write this for a part of a character.
_PARTIAL_CHARACTER = "\ufffd"
# vLLM writes this for minus infinity.
_NO_LOSS_NATS = 9999.0


# -- The kinds of servers ----------------------------------------------------------------------

# An answer has the logprobs of N tokens, or None, and their ids or texts. The start token is the
# first.
Answer = tuple[list[float | None], list[int | str | None]]


class Api(NamedTuple):
    """How one kind of server is asked for the losses of a prompt's tokens."""

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


APIS = {
    "vllm": Api("/v1/completions", partial(_request_completion, prompt_logprobs=0), _read_vllm),
    "sglang": Api("/generate", _request_sglang, _read_sglang),
    "echo": Api("/v1/completions", partial(_request_completion, echo=True, logprobs=1), _read_echo),
}


# -- Requests ----------------------------------------------------------------------------------


class ServerScorer:
    """Scores windows of a reader's tokens with a named model on a server.

    The server's key is read from the environment. It is neither logged nor sent to another host.
    """

    def __init__(self, url: str, model: str, api: str, reader: Reader, concurrency: int):
        # A key in the address would get into logs and manifests, so it is rejected.
        if not re.fullmatch(r"https?://[^@?]+", url):
            raise OptionError("server", f"must be http://HOST:PORT, and its key in {API_KEY}")
        # People copy the address of an OpenAI client, which ends in /v1. The paths here begin with
        # it.
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model, self._api, self._reader = model, api, reader
        self._concurrency = concurrency
        self._key = os.environ.get(API_KEY, "").strip()
        self._http = requests.Session()
        # A wrong address should be reported at once, so there are fewer retries before `check`.
        self._adapter = HTTPAdapter(max_retries=RETRIES.new(total=3), pool_maxsize=concurrency)
        self._http.mount(self._url, self._adapter)
        if self._key:
            self._http.headers["Authorization"] = f"Bearer {self._key}"

    @property
    def about(self) -> dict[str, object]:
        """Describe how a store was made. The server's weights and their dtype are unknown."""
        return {
            "engine": "served",
            "server": self._url,
            "served_model": self._model,
            "api": self._api,
            "dtype": None,
            "teacher_revision": None,
        }

    def check(self) -> None:
        """Reject a server that does not give the losses of the longest prompt that it may get."""
        ids = encode(self._reader.tokenizer, PROBE).ids.tolist()
        # A server with a shorter context would answer, but lose every long document.
        ids = (ids * self._reader.text_limit)[: self._reader.text_limit]
        # Every token of the probe is scored, so the answer is checked from the first one on.
        losses = self._ask(Window(0, [self._reader.start] + ids, len(ids)))
        # A server may accept the request, but answer with one constant for all tokens.
        if not isinstance(losses, str) and np.ptp(losses) == 0:
            losses = "all losses are the same"
        if isinstance(losses, str):
            raise OptionError(
                "api",
                f"is {self._api}, but {self._url} gives no losses for a prompt of {len(ids) + 1:,} "
                f"tokens ({losses}): give the server's kind ({', '.join(APIS)}), lower --context "
                "to the server's, or serve the teacher with vLLM or SGLang",
            )
        self._adapter.max_retries = RETRIES

    def losses(
        self, windows: Sequence[Window], report: Report | None = None
    ) -> list[LossArray | str]:
        """Return the losses of the scored tokens of each window, in nats, or why it has none.

        `report` is called with the number of tokens after every window.
        """
        answers = []
        # After an error or Ctrl-C, nothing waits for the threads, whose requests may take minutes.
        with ThreadPool(self._concurrency) as pool:
            for window, losses in zip(windows, pool.imap(self._ask, windows), strict=True):
                answers.append(losses)
                if report:
                    report(window.scored)
        return answers

    def _ask(self, window: Window) -> LossArray | str:
        """Ask for a window, again if the answer is for other tokens.

        Returns its losses in nats, or why it has none. An OptionError means that the server does
        not answer, does not know the path, the model or the key, or redirects.
        """
        api = APIS[self._api]
        url, body = self._url + api.path, api.request(self._model, window.ids)
        reason = ""
        # A wrong answer may be an accident of one request, so send the prompt again. A server that
        # answers wrongly every time does not have the teacher's tokens.
        for _ in range(_ATTEMPTS):
            try:
                # The key must not follow a redirect to another host.
                response = self._http.post(
                    url, json=body, timeout=_TIMEOUT_S, allow_redirects=False
                )
                if response.status_code == requests.codes.ok:
                    return self._checked(window, *api.read(response.json()))
            except _MALFORMED as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            except requests.RequestException as error:
                raise OptionError(
                    "server",
                    f"{url} does not answer ({error}): check it, and give the same command again "
                    "to continue",
                ) from error
            # Some servers repeat the key that they reject, and the reason may be logged.
            text = response.text.replace(self._key, "***") if self._key else response.text
            reason = " ".join(f"{response.status_code} {response.reason} {text[:200]}".split())
            if response.status_code in _REJECTED:
                return f"the server answers {reason}"
            raise OptionError("server", f"{url} answers {reason}")
        return f"the server does not answer with its losses ({reason})"

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
        # NaN is not below the bound either, so one test finds everything that is not a loss.
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
