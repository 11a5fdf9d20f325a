"""Explain in one line why a run ended: the cause, the place, and what to do."""

import traceback
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException

# Words of gloo, which knows one kind of error only, for a process that is gone or silent.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer")
# Words of torch's allocator of a CPU, and of its writer of archives.
_OUT_OF_MEMORY = "can't allocate memory"
_NOT_WRITTEN = ("file write failed", "unexpected pos")
_LOADER_LOST = "DataLoader worker"
_SHARED = (
    "shared memory"  # where workers leave batches: of torch, and of its advice for a bus error
)
_KNOBS = (
    "--per_device_train_batch_size (the global batch stays the same), --activation_checkpointing, "
    "--teacher_losses (a store instead of a teacher in memory), --teacher_sharding node, or FSDP2 "
    "(accelerate_configs)"
)


def explain(error: BaseException, doing: str) -> str | None:
    """Say cause, place ("the student's forward of step 3") and remedy of an error that is known."""
    reason = _reason(error)
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
        return f"out of memory in {doing}: try, in order of what it costs, {_KNOBS}"
    if isinstance(error, distributed.DistError) or any(text in str(error) for text in _LOST):
        return (
            f"another process ended or did not answer in time (--ddp_timeout) while this one "
            f"waited for it in {doing}: look for the error in its log, and start again, which "
            f"resumes from the newest checkpoint ({reason})"
        )
    if _SHARED in str(error) or _is_of_a_lock(error):
        return (
            f"no room for batches in /dev/shm in {doing}: use --dataloader_num_workers 0, or make "
            f"/dev/shm larger ({reason})"
        )
    if _LOADER_LOST in str(error):
        return (
            f"a process of --dataloader_num_workers ended in {doing}: stop a run with SIGUSR1 to a "
            f"training process, not with SIGTERM to all ({reason})"
        )
    # Of `host.cards.push`, behind all else.
    if "--push_to_hub" in str(error):
        return f"{reason}: the model is saved; start again, which pushes it"
    if isinstance(error, BrokenPipeError):
        return (
            f"nobody reads what is printed any more in {doing}: send it to a file, and start "
            f"again, which resumes from the newest checkpoint ({reason})"
        )
    is_of_a_file = isinstance(error, OSError | SafetensorError | CheckpointException)
    if is_of_a_file or any(text in str(error) for text in _NOT_WRITTEN):
        return (
            f"a file could not be read or written in {doing}: look at the disk and its quota, and "
            f"start again, which resumes from the newest checkpoint ({reason})"
        )
    return None


def _is_of_a_lock(error: BaseException) -> bool:
    """Test for an error of a lock between processes, which lies in /dev/shm, too."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).parent.name == "multiprocessing"


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of several processes' errors, of one of them."""
    if isinstance(error, CheckpointException):
        for found, _ in error.failures.values():
            return _reason(found)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
