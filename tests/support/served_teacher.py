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
# Takes the number of a request; returns the fault to answer with, or None.
Plan = Callable[[int], "str | None"]


class ServedTeacher(ThreadingHTTPServer):
    """A server that keeps requests in `bodies` and `headers`, and the answered ones in `answered`.

    Attributes:
        apis: those that it has; llama.cpp takes only text, leaves out the start token, and hides
            the first token's loss.
        echoes: how its completions echo ids: with the texts of tokens, or their ids, or as
            Together does.
        noise: what to add to the losses of the request of this number.
        start: its start token.
        known_as: the model's name.
        is_late: gives each token the next one's loss, as llama.cpp with another start token does.
        known: log-probabilities by prompt, which servers of one model may share.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        start: int,
        known: dict[tuple[int, ...], list[float | None]] | None = None,
        port: int = 0,
    ):
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model, self.tokenizer, self.start = model, tokenizer, start
        self.apis: Sequence[str] = ("vllm", "sglang", "echo", "llama.cpp")
        self.known_as, self.is_late = MODEL, False
        self.echoes = "texts"
        self.noise: Callable[[int], float] = lambda number: 0.0
        self.bodies: list[dict[str, Any]] = []
        self.answered: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.failed: Counter[str] = Counter()
        self.busiest = 0
        self.lies_about: str | None = None
        self.retry_after = "0.01"
        self.plan: Plan = lambda number: None
        self._lock, self._now = threading.Lock(), 0
        self.known = {} if known is None else known

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
            self.failed[fault or "none"] += 1
            if fault is None:
                self.answered.append(body)
        try:
            yield fault
        finally:
            with self._lock:
                self._now -= 1

    def ids(self, prompt: str | list[int]) -> list[int]:
        """Encode a prompt; the start token's text at its beginning becomes that token."""
        if not isinstance(prompt, str):
            return prompt
        typed = str(self.tokenizer.decode([self.start]))
        starts = [self.start] * prompt.startswith(typed)
        text = prompt.removeprefix(typed)
        return [*starts, *self.tokenizer.encode(text, add_special_tokens=False)]

    @torch.no_grad()
    def logprobs(self, ids: list[int]) -> list[float | None]:
        """The log-probability of every token but the first."""
        with self._lock:
            if tuple(ids) not in self.known:
                ids_T = torch.tensor(ids)
                logits_TV = self.model(ids_T[None]).logits[0].float().log_softmax(-1)
                found = logits_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]
                self.known[tuple(ids)] = [None, *found.tolist()]
            return list(self.known[tuple(ids)])

    @torch.no_grad()
    def followers(self) -> dict[str, float]:
        """Log-probabilities of the first token by its text, empty for partial characters."""
        logits_V = self.model(torch.tensor([[self.start]])).logits[0, -1].float().log_softmax(-1)
        return {
            self.token(token).replace("\ufffd", ""): value
            for token, value in enumerate(logits_V.tolist())
        }

    def token(self, token: int) -> str:
        decode = self.tokenizer.decode
        return str(decode([self.start, token]))[len(str(decode([self.start]))) :]


class _Handler(BaseHTTPRequestHandler):
    server: ServedTeacher
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
                self._say(429, {"error": "busy"}, **{"Retry-After": self.server.retry_after})
            elif fault == "error":
                self._say(500, {"error": "out of order"})
            elif fault == "too large":
                self._say(413, {"error": "too large"})
            elif fault == "garbled":
                self._say(200, "{}", **{"Content-Encoding": "gzip"})
            elif fault == "rejected key":
                self._say(401, {"error": f"not {self.headers['Authorization']}"})
            elif fault == "html":
                self._say(200, "<html>a proxy</html>")
            elif fault == "elsewhere":
                self._say(307, {}, Location="http://elsewhere.invalid/")
            else:
                self._answer(body, fault)

    def _answer(self, body: dict[str, Any], fault: str | None) -> None:
        server, kind = self.server, self._kind(body)
        prompt = body.get("prompt", body.get("input_ids"))
        if kind == "sglang" and kind not in server.apis:
            return self._say(404, {"error": "no such path"})
        if body.get("model", server.known_as) != server.known_as:
            return self._say(404, {"error": f"no such model: {body['model']}"})
        if kind == "llama.cpp" and not isinstance(prompt, str):
            return self._say(422, {"error": "a prompt is a text"})
        ids = server.ids(prompt)
        if len(ids) >= server.model.config.max_position_embeddings:
            return self._say(400, {"error": "longer than the context"})
        if server.lies_about and server.tokenizer.decode(ids).endswith(server.lies_about):
            fault = "lie"
        told, values = _spoilt(ids, fault), _worse(server.logprobs(ids), fault)
        noise = server.noise(len(server.bodies))
        values = [value and value - noise for value in values]
        if kind == "llama.cpp":
            content = self._completion(body, ids, told, values)
        elif kind == "echo":
            content = self._echo(body, told, values)
        elif kind == "sglang":
            rows = [[value, token, None] for value, token in zip(values, told, strict=False)]
            content = {"text": "x", "meta_info": {"input_token_logprobs": rows}}
        else:
            prompt: list[dict[str, Any] | None] = [None]
            for token, value in zip(told[1:], values[1:], strict=False):
                about = {"logprob": value, "rank": 1, "decoded_token": server.token(token)}
                prompt.append({str(token): about})
            content = {"choices": [{"index": 0, "text": "x", "prompt_logprobs": prompt}]}
        return self._say(200, content, half=fault == "half")

    def _kind(self, body: dict[str, Any]) -> str:
        """Tell which API a request is for."""
        if self.path == "/generate":
            return "sglang"
        if "prompt_logprobs" in body and "vllm" in self.server.apis:
            return "vllm"
        is_echo = "echo" in self.server.apis and not isinstance(body["prompt"], str)
        return "echo" if is_echo else "llama.cpp"

    def _completion(
        self, body: dict[str, Any], ids: list[int], told: list[int], values: list[float | None]
    ) -> dict[str, Any]:
        """Answer as llama-cpp-python does."""
        server = self.server
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None}
        if "llama.cpp" in server.apis and body.get("echo"):
            texts = [server.token(token).replace("\ufffd", "") for token in told[1:]]
            values = [*values[2:], -1.0] if server.is_late else [None, *values[2:]]
            choice["logprobs"] = {"tokens": [*texts, "x"], "token_logprobs": [*values, -1.0]}
        elif "llama.cpp" in server.apis and body.get("logprobs") and ids == [server.start]:
            choice["logprobs"] = {"top_logprobs": [server.followers()]}
        return {"choices": [choice], "usage": usage}

    def _echo(
        self, body: dict[str, Any], told: list[int], values: list[float | None]
    ) -> dict[str, Any]:
        """Answer ids as hosts do: with the prompt and one new token."""
        server = self.server
        usage = {"prompt_tokens": len(told), "completion_tokens": 1}
        choice: dict[str, Any] = {"index": 0, "text": "x", "logprobs": None}
        content: dict[str, Any] = {"choices": [choice], "usage": usage}
        if not (body.get("echo") and body.get("logprobs")):
            return content
        prompt = {"tokens": [server.token(token) for token in told], "token_logprobs": values}
        if server.echoes == "together":
            content["prompt"] = [{"text": "", "logprobs": {**prompt, "token_ids": told}}]
            return content
        choice["logprobs"] = {
            "tokens": [*prompt["tokens"], "x"],
            "token_logprobs": [*values, -1.0],
        }
        if server.echoes == "ids":
            choice["logprobs"]["token_ids"] = [*told, 0]
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
def served(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, start: int, **shared: Any
) -> Iterator[ServedTeacher]:
    """Serve a model until the end of the block."""
    server = ServedTeacher(model, tokenizer, start, **shared)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
