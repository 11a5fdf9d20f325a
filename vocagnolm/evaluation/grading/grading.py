"""Grading in processes that can be killed: every text gets a verdict in bounded time and memory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.extraction import AnswerKind

_ROOT = Path(__file__).resolve().parents[3]
# The last resort, for a worker that waits. Workers that compute are ended by limits of processor
# time (`worker.py`), so verdicts do not depend on how busy the machine is.
WALL_LIMIT_S = 600.0
# NumPy reserves memory for each thread, and on many cores more than a worker may have.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Verdict:
    """The graders' judgement of one output."""

    # The prediction is normalised. It is None if there is no output, or none in time.
    prediction: str | None = None
    correct: bool = False
    # "choice" (letters), "string", "numeric", "empty", "symbolic"; or without a verdict "timeout"
    # or "crash", for example when a worker has too little memory.
    decided_by: str = ""
    # The second opinion. None for letters, and if it did not come in time.
    math_verify: bool | None = None


class Grader:
    """A pool of workers. Use it as a context manager; it starts nothing before it is entered.

    For example:

        with Grader() as grader:
            [verdict] = grader.grade("free", [("2 + 2 = 4. The answer is 4.", "4")])
    """

    def __init__(self, workers: int | None = None, processes: int = 1) -> None:
        # The processes of a job share a machine's cores.
        self.workers = workers or max(1, min(8, (os.cpu_count() or 1) // processes))

    def __enter__(self) -> "Grader":
        # There are as many workers as threads, so a thread always finds an idle one.
        self._idle = [_Worker() for _ in range(self.workers)]
        self._threads = ThreadPoolExecutor(self.workers)
        # An environment that cannot grade is an error before anything is generated.
        try:
            for worker in self._idle:
                worker.wait()
        except ValueError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._idle:
            worker.stop()

    def grade(
        self, kind: AnswerKind | None, answers: Iterable[tuple[str, str]]
    ) -> Iterator[Verdict]:
        """Grade (output, gold) pairs in order. If kind is None, grade (prediction, gold)."""

        def grade_one(answer: tuple[str, str]) -> Verdict:
            # A list needs no lock for this, because `pop` and `append` are atomic.
            worker = self._idle.pop()
            # The worker has died if the answer before was too much for it.
            if worker.process.poll() is not None:
                worker = _Worker()
            try:
                return worker.grade(kind, *answer)
            finally:
                self._idle.append(worker)

        return self._threads.map(grade_one, answers)


class _Worker:
    """A process that grades until an answer is too much for it."""

    def __init__(self) -> None:
        self._connection, worker_end = Pipe()
        with worker_end:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vocagnolm.evaluation.grading.worker"],
                stdin=worker_end.fileno(),
                # What a library prints must not reach our output.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # `-m` searches this directory first, and so finds this very package.
                cwd=_ROOT,
                env=os.environ | _ONE_THREAD,
                # A keyboard interrupt is for the parent, and must not end the workers.
                start_new_session=True,
            )
        self._is_ready = False

    def wait(self) -> None:
        """Wait until the process can grade. A ValueError means that it cannot."""
        if self._is_ready:
            return
        try:
            self._receive()
        except (EOFError, OSError):
            self.stop()
            command = "python -m vocagnolm.evaluation.grading.worker"
            raise ValueError(f"a grading worker does not start: run `{command}`") from None
        self._is_ready = True

    def stop(self) -> int:
        """End the process and return its status."""
        self.process.kill()
        self._connection.close()
        return self.process.wait()

    def grade(self, kind: AnswerKind | None, output: str, gold: str) -> Verdict:
        self.wait()
        verdict = Verdict()
        try:
            self._connection.send_bytes(json.dumps([kind, output, gold]).encode())
            # Each reply adds to the verdict, which counts even if the worker dies before the next
            # reply.
            for _ in range(3):
                verdict = replace(verdict, **self._receive())
        except (EOFError, OSError) as error:
            # The limit of processor time ends a worker with SIGPROF.
            late = self.stop() == -signal.SIGPROF or isinstance(error, TimeoutError)
            if not verdict.decided_by:
                verdict = replace(verdict, decided_by="timeout" if late else "crash")
        return verdict

    def _receive(self) -> dict[str, Any]:
        """Read the next reply. If the worker has ended, an EOFError or OSError is raised."""
        if not self._connection.poll(WALL_LIMIT_S):
            raise TimeoutError
        # Replies are JSON, because `recv` would unpickle what a worker sends.
        reply: dict[str, Any] = json.loads(self._connection.recv_bytes())
        return reply
