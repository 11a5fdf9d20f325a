"""Grading by processes that can be killed: any text gets a verdict in bounded time and memory."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.grading.extraction import AnswerKind

_ROOT = Path(__file__).resolve().parents[3]
# For a worker that waits instead of working; processor time ends it sooner.
WALL_LIMIT_S = 20.0
START_LIMIT_S = 120.0


@dataclass(frozen=True)
class Verdict:
    """Judgement of the graders on one output."""

    # Normalised; None where there is no output, or none in time.
    prediction: str | None = None
    correct: bool = False
    # "choice" (letters), "string", "numeric", "empty", "symbolic"; or "timeout", "crash" (of the
    # worker, for lack of memory for example), which left no verdict.
    decided_by: str = ""
    # The second opinion; None for letters, and where there was none in time.
    math_verify: bool | None = None


class Grader:
    """A pool of workers. Use as a context manager; nothing runs before it is entered."""

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or min(8, os.cpu_count() or 1)

    def __enter__(self) -> Grader:
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(_Worker())
        self._threads = ThreadPoolExecutor(self.workers)
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().stop()

    def grade(
        self, kind: AnswerKind | None, answers: Iterable[tuple[str, str]]
    ) -> Iterator[Verdict]:
        """Grade (output, gold) pairs, in their order; kind None: (prediction, gold)."""

        def grade_one(answer: tuple[str, str]) -> Verdict:
            worker = self._idle.get()
            try:
                return worker.grade(kind, *answer)
            finally:
                self._idle.put(worker)

        return self._threads.map(grade_one, answers)


class _Worker:
    """One process at a time, a new one after each death."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vocagnolm.evaluation.grading.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # `-m` looks here first, and finds this very package.
            cwd=_ROOT,
            # An interrupt is for us.
            start_new_session=True,
        )
        self._received = b""
        self._ready = False

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def grade(self, kind: AnswerKind | None, output: str, gold: str) -> Verdict:
        if self._process.poll() is not None:
            self._replace()
        if not self._ready:
            try:
                self._receive(START_LIMIT_S)
            except _WorkerDiedError:
                raise ValueError(
                    "expected a grading worker, found that it does not start: "
                    "`python -m vocagnolm.evaluation.grading.worker` says why"
                ) from None
            self._ready = True
        verdict = Verdict()
        try:
            self._send(json.dumps([kind, output, gold]).encode() + b"\n")
            # Each reply adds to the verdict, which stands if the worker dies before the next one.
            for _ in range(3):
                verdict = replace(verdict, **self._receive(WALL_LIMIT_S))
        except _WorkerDiedError as error:
            # The limit of processor time ends a worker by SIGPROF.
            ended = "timeout" if self._replace() == -signal.SIGPROF else str(error)
            if not verdict.decided_by:
                verdict = replace(verdict, decided_by=ended)
        return verdict

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(line)
        try:
            # A signal may end a write in the middle.
            while rest:
                rest = rest[self._process.stdin.write(rest) :]
        except BrokenPipeError as error:
            raise _WorkerDiedError("crash") from error

    def _receive(self, limit: float) -> dict[str, Any]:
        """Read the next reply, in at most `limit` seconds."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit
        while b"\n" not in self._received:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                self._process.kill()
                raise _WorkerDiedError("timeout")
            received = self._process.stdout.read(1 << 20)
            if not received:
                raise _WorkerDiedError("crash")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _replace(self) -> int:
        """Start another process, and return the status of the last one."""
        status = self._process.wait()
        self._process.communicate()
        self._start()
        return status


class _WorkerDiedError(Exception):
    """The worker ended, or had to be ended, before it replied."""
