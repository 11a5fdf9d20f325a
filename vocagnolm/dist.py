"""The processes of one job: what rank 0 decides, what one process of a machine does first."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from torch import distributed

from vocagnolm.conventions import SharedError

LONGEST_WAIT = timedelta(days=7)
_POLL_S = 0.05
_T = TypeVar("_T")


def rank0(decide: Callable[[], _T]) -> _T:
    """Call a function on rank 0; return its answer, or raise its error, on every process."""
    state = PartialState()
    if state.num_processes == 1:
        return decide()
    answer: list[Any] = [None, None]
    if state.is_main_process:
        try:
            answer[0] = decide()
        except (ValueError, ImportError, OSError) as error:
            answer[1] = str(error)
    group = _patient_group(distributed.group.WORLD)
    distributed.broadcast_object_list(answer, src=0, group=group)
    decided, why = answer
    if why is not None:
        raise SharedError(why)
    return decided  # type: ignore[no-any-return]


@contextmanager
def machine_first() -> Iterator[None]:
    """Let one process of each machine do the work, however long, and the others find it done."""
    wait, is_first = _barrier(), PartialState().is_local_main_process
    if not is_first:
        wait()
    try:
        yield
    finally:
        # After an error too, or the others would wait for good.
        if is_first:
            wait()


def _barrier() -> Callable[[], None]:
    """Return a barrier without a time-out; all processes have to ask for it at once."""
    if PartialState().num_processes == 1:
        return lambda: None
    group = _patient_group(distributed.group.WORLD)

    def wait() -> None:
        work = distributed.barrier(group, async_op=True)
        # A blocking wait would hear no signals.
        while not work.is_completed():
            time.sleep(_POLL_S)
        work.wait()

    return wait


@lru_cache(maxsize=1)
def _patient_group(world: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """Make a gloo group: NCCL takes a long wait for a hang, and keeps a core busy."""
    # One for each world, as all processes have to be there to make one.
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return group


def connect() -> PartialState:
    """Join the processes of a job, over gloo where there is no accelerator."""
    state = PartialState(cpu=is_on_cpu(), timeout=LONGEST_WAIT)
    if fault := connection_fault(state.num_processes):
        raise ValueError(fault)
    return state


def connection_fault(connected: int) -> str | None:
    """Describe processes that were started as one job but would run as many, in one directory."""
    if (started := launched_processes()) == connected:
        return None
    return (
        f"{started} processes were started (WORLD_SIZE), but this one is connected to no other: "
        "start them with torchrun or accelerate launch, or unset WORLD_SIZE"
    )


def launched_processes() -> int:
    """Return the number of processes of this job, as its launcher gives it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_on_cpu() -> bool:
    """Return True without an accelerator, and under `accelerate launch --cpu`."""
    # Accelerate has to be told, or it takes processes on a CPU for separate runs.
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")


def cores() -> int:
    """Return the number of cores that this process may use, which on a shared machine are few."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


# -- Until evaluation calls `rank0` ---------------------------------------------------------------


@contextmanager
def in_agreement(*, takes_long: bool = False) -> Iterator[None]:
    """Raise the error of one process in all of them."""
    why, wait = None, _barrier() if takes_long else None
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        why = str(error)
    if wait:
        wait()
    if reasons := list(filter(None, gather_object([why]))):
        raise SharedError(reasons[0])
