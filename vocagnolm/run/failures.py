"""What a run ended by, told in one line: what happened, where, and what to do."""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

from vocagnolm.host.processes import SharedError

# How gloo, which knows one kind of error only, tells that a process is gone or silent.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer")
_OUT_OF_MEMORY = "can't allocate memory"  # what torch's allocator of a CPU says
_NOT_WRITTEN = ("file write failed", "unexpected pos")  # what torch's writer of archives says
_LOADER_LOST = "DataLoader worker"
_MAIN_FIRST_S = 1  # so that the first process tells what all have met
_KNOBS = (
    "--per_device_train_batch_size (the global batch stays the same), --activation_checkpointing, "
    "--teacher_losses (a store instead of a teacher in memory), --teacher_sharding node, or FSDP2 "
    "(accelerate_configs)"
)


def explain(error: BaseException, doing: str) -> str | None:
    """What happened and what to do about it; None for an error of another kind.

    Args:
        error: that ended the run.
        doing: what the run was doing, as "the student's forward of step 3".
    """
    reason = _reason(error)
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
        return f"out of memory in {doing}: try, in order of what it costs, {_KNOBS}"
    if isinstance(error, distributed.DistError) or any(text in str(error) for text in _LOST):
        return (
            f"another process ended or did not answer in time (--ddp_timeout) while this one "
            f"waited for it in {doing}: look for the error in its log, and start again, which "
            f"goes on from the newest checkpoint ({reason})"
        )
    if _LOADER_LOST in str(error):
        return (
            f"a process of --dataloader_num_workers ended in {doing}: stop a run with SIGUSR1 to a "
            f"training process, not with SIGTERM to all ({reason})"
        )
    is_of_a_file = isinstance(error, OSError | SafetensorError | CheckpointException)
    if is_of_a_file or any(text in str(error) for text in _NOT_WRITTEN):
        return (
            f"a file could not be read or written in {doing}: look at the disk and its quota, and "
            f"start again, which goes on from the newest checkpoint ({reason})"
        )
    return None


def _reason(error: BaseException) -> str:
    """The first line of what an error says; of several processes' errors, of one of them."""
    if isinstance(error, CheckpointException):
        for found, _ in error.failures.values():
            return _reason(found)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def tell(error: BaseException | str) -> None:
    """Say on stderr what ended the run, in one line; once on each machine what several say."""
    text = " ".join(str(error).split())
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_MAIN_FIRST_S)
    if not _is_first_to_tell(text):
        return
    is_shared = rank == "0" or isinstance(error, SharedError)
    name = "train.py" if is_shared else f"train.py (process {rank})"
    sys.stderr.write(f"{name}: error: {text}\n")
    sys.stderr.flush()
    if rank == "0" and distributed.is_initialized():
        time.sleep(2 * _MAIN_FIRST_S)  # it may be this process that keeps the count


def _is_first_to_tell(text: str) -> bool:
    if not distributed.is_initialized():  # wrong arguments, which all processes were given
        return os.environ.get("LOCAL_RANK", "0") == "0"
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = f"vocagnolm told {os.environ.get('GROUP_RANK', '0')} {digest}"
    try:
        return int(distributed.distributed_c10d._get_default_store().add(key, 1)) == 1
    except (RuntimeError, ValueError):  # who keeps the count is gone
        return True
