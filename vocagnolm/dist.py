"""The processes of one job: what rank 0 decides, what one process of a machine does first."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch import distributed

from vocagnolm.conventions import SharedError

_LONGEST_WAIT = timedelta(days=7)
_T = TypeVar("_T")


def rank0(decide: Callable[[], _T]) -> _T:
    """Call a function on rank 0; return its answer, or raise its error, on every process."""
    state = PartialState()
    if state.num_processes == 1:
        return decide()
    answer: list[Any] = [None]
    if state.is_main_process:
        try:
            answer = [decide()]
        except (ValueError, ImportError, OSError) as error:
            answer = [SharedError(str(error))]
    group = _patient_group(distributed.group.WORLD)
    distributed.broadcast_object_list(answer, src=0, group=group)
    if isinstance(answer[0], SharedError):
        raise answer[0]
    return answer[0]  # type: ignore[no-any-return]


@contextmanager
def machine_first() -> Iterator[None]:
    """Let one process of each machine do the work, however long, and the others find it done."""
    state = PartialState()
    if state.num_processes == 1:
        yield
        return
    # Now, as all processes have to be there to make it.
    group = _patient_group(distributed.group.WORLD)
    if not state.is_local_main_process:
        distributed.barrier(group)
    try:
        yield
    finally:
        # After an error too, or the others would wait for good.
        if state.is_local_main_process:
            distributed.barrier(group)


@lru_cache(maxsize=1)
def _patient_group(world: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """Make a gloo group: NCCL takes a long wait for a hang, and keeps a core busy."""
    # One for each world.
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return group


def connect() -> PartialState:
    """Join the processes of a job, over gloo where there is no accelerator."""
    state = PartialState(cpu=is_on_cpu(), timeout=_LONGEST_WAIT)
    check_connected(state.num_processes)
    return state


def check_connected(processes: int) -> None:
    """Reject processes of one job that would do the same work, each by itself."""
    if (started := launched_processes()) != processes:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but this one is connected to no "
            "other: start them with torchrun or accelerate launch, or unset WORLD_SIZE"
        )


def launched_processes() -> int:
    """Return the number of processes of this job, as its launcher gives it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_on_cpu() -> bool:
    """Return True without an accelerator, and under `accelerate launch --cpu`."""
    # Accelerate needs it, or it takes processes on a CPU for separate runs.
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")


def cores() -> int:
    """Return the number of cores that this process may use, which on a shared machine are few."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1
