"""Processes of `vocagnolm score` that start at once, to be killed.

python tests/support/score_worker.py

Reads one JSON request per line: `{"argv": [...], "environ": {...}, "log": FILE, "scored": FILE}`
starts a process and is answered with its id, `{"wait": ID}` with its exit status, negative for a
signal. A process writes to FILE a line "begin PROCESS SHARD" before it scores a shard, and a line
"end PROCESS SHARD" when it is written.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fork_server import serve
from transformers import LlamaForCausalLM  # noqa: F401 - imported before processes are forked

from vocagnolm.store import score, scoring

_SHARD_S = 0.02  # a shard takes so long at least, so that kills meet some


class Processes:
    """What starts and ends the processes."""

    def __init__(self) -> None:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(root),
                "CUDA_VISIBLE_DEVICES": "",
            },
        )

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, argv: Sequence[str], log: Path, scored: Path, **environ: str) -> int:
        request = {"argv": list(argv), "log": str(log), "scored": str(scored), "environ": environ}
        return self._ask(request)

    def start_two(self, argv: Sequence[str], log: Path, scored: Path) -> list[int]:
        """One job of two gloo processes, as launched by torchrun."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
        shared |= {"WORLD_SIZE": "2"}
        return [
            self.start(argv, log, scored, **shared, RANK=rank, LOCAL_RANK=rank)
            for rank in ("0", "1")
        ]

    def wait(self, process: int) -> int:
        return self._ask({"wait": process})

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def kill(process: int) -> None:
    """SIGKILL a process that has not been waited for, whether it has ended or not."""
    os.kill(process, signal.SIGKILL)


def run(request: dict[str, Any]) -> None:
    """Be the command, in a process of its own."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= request["environ"]
    scored = os.open(request["scored"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = scoring.score_shard

    def score_shard(job: Any, shard: int, scorer: Any) -> None:
        os.write(scored, f"begin {os.getpid()} {shard}\n".encode())
        time.sleep(_SHARD_S)
        original(job, shard, scorer)
        os.write(scored, f"end {os.getpid()} {shard}\n".encode())

    scoring.score_shard = score_shard
    status = score.main(request["argv"])
    sys.stdout.flush()
    # One exit in about twenty would abort in gloo's threads, with all the work done.
    os._exit(status)


if __name__ == "__main__":
    serve(run)
