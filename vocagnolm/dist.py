"""Agreement between the processes of one job, and waiting for one another."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from torch import distributed

from vocagnolm.conventions import SharedError

LONGEST_WAIT = timedelta(days=7)
# Between two looks of a process that waits.
_LOOK_S = 0.05
_T = TypeVar("_T")


@contextmanager
def in_agreement(*, takes_long: bool = False) -> Iterator[None]:
    """Raise the error of one process in all of them; `takes_long` lifts the others' time-out."""
    # All processes come to the exchange below, whether they failed or not; one that raised at once
    # would leave the others waiting there until their time-out.
    why, wait = None, _patience() if takes_long else None
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        why = str(error)
    if wait:
        wait()
    if reasons := list(filter(None, gather_object([why]))):
        raise SharedError(reasons[0])


def decided_by_one(decide: Callable[[], _T]) -> _T:
    """Decide in the first process, and return its answer or raise its error in all of them."""
    answer: list[_T | None] = [None]
    with in_agreement(takes_long=True):
        if PartialState().is_main_process:
            answer = [decide()]
    decided: _T = broadcast_object_list(answer)[0]
    return decided


@contextmanager
def first_of_machine_first() -> Iterator[None]:
    """Let one process of each machine do the work, and the others find it done; no time-out."""
    wait, is_first = _patience(), PartialState().is_local_main_process
    if not is_first:
        wait()
    try:
        yield
    finally:
        if is_first:
            wait()


def _patience() -> Callable[[], None]:
    """Return a barrier without time-out; all processes have to ask for it at once."""
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return lambda: None
    # NCCL would count the wait as a hang, and keep a core busy with it.
    group = _patient_group(distributed.group.WORLD)

    def wait() -> None:
        work = distributed.barrier(group, async_op=True)
        # Awake, so that signals reach it, and it notices at once when another one has ended.
        while not work.is_completed():
            time.sleep(_LOOK_S)
        work.wait()

    return wait


@lru_cache(maxsize=1)
def _patient_group(world: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """Make a group of all processes once per world: another one would wait for those that left."""
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return group


def connect() -> PartialState:
    """Join the processes of a job, over gloo where there is no accelerator."""
    state = PartialState(cpu=is_on_cpu(), timeout=LONGEST_WAIT)
    if fault := connection_fault(state.num_processes):
        raise ValueError(fault)
    return state


def connection_fault(connected: int) -> str | None:
    """Say that processes were started as one job but would run as many, in one directory."""
    if (started := launched_processes()) == connected:
        return None
    return (
        f"{started} processes were started (WORLD_SIZE), but this one is connected to no other: "
        "start them with torchrun or accelerate launch, or unset WORLD_SIZE"
    )


def launched_processes() -> int:
    """Return the processes of this job, as the launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_on_cpu() -> bool:
    """Return True without an accelerator, and under `accelerate launch --cpu`."""
    # Accelerate has to be told, or it takes processes on a CPU for separate runs.
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")


def cores() -> int:
    """Return the cores that this process may use, which on a shared machine are not all."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
