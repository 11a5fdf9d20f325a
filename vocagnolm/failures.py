"""What a run ended by: errors of torch that a user can do something about, told in one line."""

from __future__ import annotations

import torch
from torch import distributed

# How gloo, which knows one kind of error only, tells that a process is gone or silent.
_LOST = ("gloo", "Connection closed by peer", "Connection reset by peer")
_OUT_OF_MEMORY = "can't allocate memory"  # what torch's allocator of a CPU says
_KNOBS = (
    "--per_device_train_batch_size (the global batch stays the same), --activation_checkpointing, "
    "--teacher_losses (a store instead of a teacher in memory), --teacher_sharding node, or FSDP2 "
    "(accelerate_configs)"
)


def explain(error: RuntimeError, doing: str) -> str | None:
    """What happened and what to do about it; None for an error of another kind.

    Args:
        error: that ended the run.
        doing: what the run was doing, as "the student's forward of step 3".
    """
    if isinstance(error, torch.OutOfMemoryError) or _OUT_OF_MEMORY in str(error):
        return f"out of memory in {doing}: try, in order of what it costs, {_KNOBS}"
    if isinstance(error, distributed.DistError) or any(text in str(error) for text in _LOST):
        reason = str(error).strip().splitlines()[0][:200]
        return (
            f"another process ended or did not answer in time (--ddp_timeout) while this one "
            f"waited for it in {doing}: look for the error in its log, and start again, which "
            f"goes on from the newest checkpoint ({reason})"
        )
    return None
