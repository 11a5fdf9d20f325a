"""A process that imports once and forks for every request, so that scripts start fast.

A request names the log that takes all output, and variables to add to the environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# A process that waits for another that has failed would wait for half an hour.
LIMIT_S = 300


class ForkServer:
    """Starts a script, of this directory or elsewhere, that calls `serve`; sends it requests."""

    def __init__(self, script: str, **environ: str) -> None:
        path = os.pathsep.join(map(str, (HERE.parents[1], HERE)))
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ, "CUDA_VISIBLE_DEVICES": ""},
        )

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, request: dict[str, Any]) -> int:
        """Start a process and return its id."""
        return self._ask({"environ": {}, **request})

    def start_job(self, *requests: dict[str, Any]) -> list[int]:
        """Start a job of one gloo process for each request, as torchrun does."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        size = str(len(requests))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        started = []
        for number, request in enumerate(requests):
            rank = {"RANK": str(number), "LOCAL_RANK": str(number)}
            started.append(self.start({**request, "environ": shared | rank}))
        return started

    def wait(self, process: int) -> int:
        """Return a process's exit status, negative for a signal."""
        return self._ask({"wait": process})

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def serve(run: Callable[[dict[str, Any]], int]) -> None:
    """Answer JSON lines: a request to run with the child's id, `{"wait": id}` with its status."""
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                _be(run, request)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _be(run: Callable[[dict[str, Any]], int], request: dict[str, Any]) -> None:
    """Run a request in the child, which never returns to the loop."""
    status = 99
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ |= request["environ"]
        signal.alarm(LIMIT_S)
        status = run(request)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
    finally:
        # About one normal exit in twenty would abort in gloo's threads, after all work is done.
        os._exit(status)
