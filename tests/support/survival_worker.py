"""Training runs that start at once and meet a signal at a chosen moment.

python tests/support/survival_worker.py

Reads one JSON request per line: `{"argv": [...], "environ": {...}, "log": FILE, "events": FILE}`
starts a process and is answered with its id, `{"wait": ID}` with its exit status, negative for a
signal. The process writes a line to the second file at each event of training and saving: the time
in seconds, and what happens. With
`"signal": NAME` it sends itself that signal at the events numbered `"at"`, or `"after_s"` seconds
after the first event; with `"break"`, something is broken (see `BREAKS`).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from fork_server import serve
from transformers import LlamaForCausalLM

from vocagnolm.cli import run_script
from vocagnolm.run import job, options, resume, train
from vocagnolm.trainer import VocAgnoTrainer

ROOT = Path(__file__).parents[2]
_SAVE_S = 0.01  # each operation of a save takes so long at least, so that signals meet some


class Runs:
    """What starts and ends the processes."""

    def __init__(self, cache: Path) -> None:
        environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        )

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, argv: Sequence[str], log: Path, **request: Any) -> int:
        paths = {"log": str(log), "events": str(log.with_suffix(".events"))}
        return self._ask({"argv": list(argv), "environ": {}, **paths, **request})

    def start_two(self, argv: Sequence[str], log: Path, *requests: dict[str, Any]) -> list[int]:
        """One job of two gloo processes, as launched by torchrun, each with its own request."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2"}
        shared |= {"WORLD_SIZE": "2"}
        started = []
        for rank, request in enumerate(requests):
            environ = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            place = log.with_name(f"{log.stem}-{rank}{log.suffix}")
            started.append(self.start(argv, place, environ=environ, **request))
        return started

    def wait(self, process: int) -> int:
        return self._ask({"wait": process})

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


class Moment:
    """Counts events, and sends the signal at the chosen one."""

    def __init__(self, request: dict[str, Any]):
        self._number, self._count = request.get("signal"), 0
        self._at, self._after_s = request.get("at", ()), request.get("after_s")
        self._file = os.open(request["events"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def event(self, name: str) -> None:
        os.write(self._file, f"{time.monotonic()} {name}\n".encode())
        if self._count == 0 and self._after_s is not None:
            timer = threading.Timer(self._after_s, self._send)
            timer.daemon = True
            timer.start()
        if self._count in self._at:
            self._send()
        self._count += 1

    def _send(self) -> None:
        os.kill(os.getpid(), getattr(signal, self._number))


def watch(moment: Moment) -> None:
    """Make training and saving tell what they do, and saving slow."""

    def told(owner: Any, name: str, slow: bool = True) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            moment.event(f"{name} begins")
            result = original(*args, **kwargs)
            if slow:
                time.sleep(_SAVE_S)
            moment.event(f"{name} ends")
            return result

        setattr(owner, name, replacement)

    told(train, "load_documents", slow=False)
    told(VocAgnoTrainer, "compute_loss", slow=False)
    told(resume.ResumableTrainer, "_save_checkpoint")
    for owner, name in (
        (torch, "save"),
        (os, "fsync"),
        (shutil, "rmtree"),
        (resume, "finish_checkpoint"),
        (Path, "rename"),
        (LlamaForCausalLM, "save_pretrained"),
    ):
        told(owner, name)


def _nan_loss(step: int, rank: str) -> None:
    """The teacher's losses of one step are NaN in one process."""
    original = VocAgnoTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == step and os.environ.get("RANK", "0") == rank:
            teacher = self.objective.teacher
            losses = teacher.losses

            def broken(batch: Any, **kwargs: Any) -> Any:
                found = losses(batch, **kwargs)
                found.loss_BT[0, 5] = torch.nan
                return found

            teacher.losses = broken
            result = original(self, model, inputs, *args, **kwargs)
            del teacher.losses
            return result
        return original(self, model, inputs, *args, **kwargs)

    VocAgnoTrainer.compute_loss = compute_loss  # type: ignore[method-assign]


def _shard(version: int) -> None:
    """The real FSDP2 path of Accelerate, on CPU: it would fall back to DDP by itself."""
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true"}
    os.environ |= {"FSDP_VERSION": str(version), "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)


def _slow_alignment(seconds: float) -> None:
    """The first process needs long to align the corpus, while the others wait."""
    original = job.align_corpus

    def align_corpus(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") == "0":
            time.sleep(seconds)
        return original(*args, **kwargs)

    job.align_corpus = align_corpus


def _full_disk(save: int) -> None:
    """The disk is full when a checkpoint of this index is to be declared complete."""
    original, saves = resume.finish_checkpoint, []

    def finish(staged: Path, *args: Any) -> None:
        saves.append(staged)
        if len(saves) == save:
            raise OSError(errno.ENOSPC, "No space left on device", str(staged))
        original(staged, *args)

    resume.finish_checkpoint = finish


BREAKS = {
    "fsdp": _shard,
    "slow": _slow_alignment,
    "nan": _nan_loss,
    "disk": _full_disk,
}


def run(request: dict[str, Any]) -> None:
    """Be the script, in a process of its own."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= request["environ"]
    for name, *where in request.get("break", ()):
        BREAKS[name](*where)
    watch(Moment(request))
    sys.argv = ["train.py", *request["argv"]]
    try:
        run_script(options.main)
    except SystemExit as left:
        status = int(left.code or 0)
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(run)
