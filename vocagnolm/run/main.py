"""The command `vocagnolm train`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vocagnolm.cli import shell
from vocagnolm.run.parser import check, parse

# `vocagnolm.run.launch` calls `check` before it starts processes, so an error is reported once.
__all__ = ["check", "main"]

_OUT_OF_MEMORY = (
    "try, in order of what it costs, --per_device_train_batch_size (the global batch stays the "
    "same), --activation_checkpointing, --teacher_losses (a store instead of a teacher in memory)"
)


@shell("vocagnolm train", out_of_memory=_OUT_OF_MEMORY, resumable=True)
def main(argv: Sequence[str] | None = None) -> int:
    """Show help, or run the job. Returns the exit status."""
    job = parse(sys.argv[1:] if argv is None else argv, on_hub=True)
    # Importing the trainer takes seconds, which help and wrong options do not need.
    from vocagnolm.run.train import train

    return train(job)
