"""What several processes of one job have to agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate.utils import gather_object, parse_flag_from_env

LONGEST_WAIT = timedelta(days=7)  # of a process for the others


class SharedError(ValueError):
    """An error in all processes, of which one tells it."""


@contextmanager
def in_agreement() -> Iterator[None]:
    """What one process refuses, all refuse in its words, so that none is left waiting for it."""
    why = None
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        why = str(error)
    if reasons := list(filter(None, gather_object([why]))):
        raise SharedError(reasons[0])


def is_on_cpu() -> bool:
    """Whether there is nothing else, or `accelerate launch --cpu` says so.

    Without being told, Accelerate takes processes on a CPU for so many runs of one process.
    """
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")
