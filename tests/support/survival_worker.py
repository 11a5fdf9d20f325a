"""Training runs for `ForkServer` that get a signal at a chosen moment.

The process writes a line to the file `events` at each event of training and saving: the time in
seconds, and what happens. With `"signal": NAME` it sends itself that signal at the events numbered
`"at"`, or `"after_s"` seconds after the first event; with `"break"`, something is broken (see
`BREAKS`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from fork_server import serve
from transformers import LlamaForCausalLM

from vocagnolm.cli import run_script
from vocagnolm.run import parser
from vocagnolm.run import train as run_train
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import packed, resumable, run_directory

_SAVE_S = 0.01  # each operation of a save takes at least this long, so that signals hit some


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
    """Make training and saving report their events, and slow saving down."""

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

    told(run_train, "read_corpora", slow=False)
    told(run_train, "pack_documents", slow=False)
    told(VocAgnoTrainer, "compute_loss", slow=False)
    told(resumable.ResumableTrainer, "_save_checkpoint")
    for owner, name in (
        (torch, "save"),
        (os, "fsync"),
        (shutil, "rmtree"),
        (run_directory, "finish_checkpoint"),
        (Path, "rename"),
        (LlamaForCausalLM, "save_pretrained"),
    ):
        told(owner, name)


def _nan_loss(step: int, rank: str) -> None:
    """Make the teacher's losses of one step NaN in one process."""
    original = VocAgnoTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 == step and os.environ.get("RANK", "0") == rank:
            teacher = self.token_objective.teacher
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
    """Force Accelerate's real FSDP path on a CPU, where it would fall back to DDP."""
    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_FSDP": "true"}
    os.environ |= {"FSDP_VERSION": str(version), "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    PartialState._prepare_backend = lambda self, *a, **k: ("gloo", DistributedType.MULTI_GPU)


def _slow_alignment(seconds: float) -> None:
    """Let the first process take long to align the corpus, while the others wait."""
    original = packed.align_corpus

    def align_corpus(*args: Any, **kwargs: Any) -> Any:
        if os.environ.get("RANK", "0") == "0":
            time.sleep(seconds)
        return original(*args, **kwargs)

    packed.align_corpus = align_corpus


BREAKS = {
    "fsdp": _shard,
    "slow": _slow_alignment,
    "nan": _nan_loss,
}


def run(request: dict[str, Any]) -> int:
    """Run the script."""
    for name, *where in request.get("break", ()):
        BREAKS[name](*where)
    watch(Moment(request))
    sys.argv = ["train.py", *request["argv"]]
    try:
        run_script(parser.main)
    except SystemExit as left:
        return int(left.code or 0)
    raise AssertionError("it leaves")


if __name__ == "__main__":
    serve(run)
