"""A small model behind a server that has every API and fails on demand.

It runs one forward pass per prompt, so equal prompts have equal answers.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

MODEL = "a-teacher"
FAULTS = ("kill", "busy", "error", "half", "garbled", "html", "nan", "minus", "short", "lie")
# What the server says to other faults: a status, a body and headers.
_ANSWERS: dict[str, tuple[int, object, dict[str, str]]] = {
    "error": (500, {"error": "out of order"}, {}),
    "too large": (413, {"error": "too large"}, {}),
    "garbled": (200, "{}", {"Content-Encoding": "gzip"}),
    "html": (200, "<html>a proxy</html>", {}),
    "elsewhere": (307, {}, {"Location": "http://elsewhere.invalid/"}),
}
# Takes the number of a request; returns the fault to answer with, or None.
Plan = Callable[[int], "str | None"]


class TeacherServer(ThreadingHTTPServer):
    """A server that keeps the bodies and headers of its requests.

    Attributes:
        apis: those that it has.
        echoes: how its completions echo ids: with the texts of tokens, or their ids, or as
            Together does.
        spoils: the end of a prompt that always meets a fault, and that fault.
        known: log-probabilities by prompt, which servers of one model may share.
        context: the length of the first prompt that is too long.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        known: dict[tuple[int, ...], list[float | None]],
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model, self.tokenizer, self.known = model, tokenizer, known
        self.apis: Sequence[str] = ("vllm", "sglang", "echo")
        self.known_as, self.echoes = MODEL, "texts"
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failed: Counter[str] = Counter()
        self.busiest = 0
        self.spoils: tuple[str, str] | None = None
        self.context = int(model.config.max_position_embeddings)
        self.plan: Plan = lambda number: None
        self._lock, self._now = threading.Lock(), 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client may leave."""

    @contextmanager
    def one(self, body: dict[str, Any], headers: dict[str, str]) -> Iterator[str | None]:
        """Take a request; yield the fault that it meets."""
        with self._lock:
            self._now += 1
            self.busiest = max(self.busiest, self._now)
            self.bodies.append(body)
            self.headers.append(headers)
            fault = self.plan(len(self.bodies))
            ids = body.get("prompt", body.get("input_ids"))
            if self.spoils and self.tokenizer.decode(ids).endswith(self.spoils[0]):
                fault = self.spoils[1]
            self.failed[fault or "none"] += 1
        try:
            yield fault
        finally:
            with self._lock:
                self._now -= 1

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float | None]:
        """The log-probability of every token but the first."""
        with self._lock:
            if tuple(ids) not in self.known:
                ids_T = torch.tensor(ids)
                logits_TV = self.model(ids_T[None]).logits[0].float().log_softmax(-1)
                logprobs = logits_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
                self.known[tuple(ids)] = [None, *logprobs.tolist()]
            return list(self.known[tuple(ids)])


class _Handler(BaseHTTPRequestHandler):
    server: TeacherServer
    protocol_version = "HTTP/1.1"
    # Otherwise each answer waits until its headers are acknowledged.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.one(body, dict(self.headers)) as fault:
            if fault == "kill":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            elif fault == "busy":
                self._say(429, {"error": "busy"}, **{"Retry-After": "0"})
            elif fault == "rejected key":
                self._say(401, {"error": f"not {self.headers['Authorization']}"})
            elif fault in _ANSWERS:
                status, content, headers = _ANSWERS[fault]
                self._say(status, content, **headers)
            else:
                self._answer(body, fault)

    def _answer(self, body: dict[str, Any], fault: str | None) -> None:
        server, kind = self.server, self._kind(body)
        ids = body.get("prompt", body.get("input_ids"))
        if kind not in server.apis:
            return self._say(404, {"error": "no such path"})
        if body.get("model", server.known_as) != server.known_as:
            return self._say(404, {"error": f"no such model: {body['model']}"})
        if len(ids) >= server.context:
            return self._say(400, {"error": "longer than the context"})
        tokens, values = _spoilt(ids, fault), _worse(server.logprobs(ids), fault)
        pairs = list(zip(tokens, values, strict=False))
        if kind == "echo":
            content = self._echo(tokens, values)
        elif kind == "sglang":
            rows = [[value, token, None] for token, value in pairs]
            content = {"text": "x", "meta_info": {"input_token_logprobs": rows}}
        else:
            prompt = [None, *({str(t): {"logprob": v, "rank": 1}} for t, v in pairs[1:])]
            content = {"choices": [{"index": 0, "text": "x", "prompt_logprobs": prompt}]}
        return self._say(200, content, half=fault == "half")

    def _kind(self, body: dict[str, Any]) -> str:
        """Tell which API a request is for."""
        if self.path == "/generate":
            return "sglang"
        return "vllm" if "prompt_logprobs" in body else "echo"

    def _echo(self, tokens: list[int], values: list[float | None]) -> dict[str, Any]:
        """Answer as hosts do: with the prompt and one new token."""
        texts = [str(self.server.tokenizer.decode([token])) for token in tokens]
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1}
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None}
        content: dict[str, Any] = {"choices": [choice], "usage": usage}
        if self.server.echoes == "together":
            logprobs = {"tokens": texts, "token_logprobs": values, "token_ids": tokens}
            content["prompt"] = [{"text": "", "logprobs": logprobs}]
            return content
        choice["logprobs"] = {"tokens": [*texts, "x"], "token_logprobs": [*values, -1.0]}
        if self.server.echoes == "ids":
            choice["logprobs"]["token_ids"] = [*tokens, 0]
        return content

    def _say(self, status: int, content: object, half: bool = False, **headers: str) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


def _spoilt(ids: list[int], fault: str | None) -> list[int]:
    """Return the tokens to send; a lie changes the last one."""
    return [*ids[:-1], (ids[-1] + 7) % 300] if fault == "lie" else ids


def _worse(values: list[float | None], fault: str | None) -> list[float | None]:
    if fault == "nan":
        values[len(values) // 2] = float("nan")
    if fault == "minus":
        values[-1] = float("inf")
    return values[:-1] if fault == "short" else values


@contextmanager
def serve(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, known: dict[Any, Any]
) -> Iterator[TeacherServer]:
    """Serve a model until the end of the block."""
    server = TeacherServer(model, tokenizer, known)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
