"""The processes of one job: what rank 0 decides, and what one process per machine does first."""

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
    """Call a function on rank 0. On every process, return its result or raise its error."""
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
    """Let one process per machine do the work. The others wait, and find it done."""
    state = PartialState()
    if state.num_processes == 1:
        yield
        return
    # Make the group now, because all processes must take part.
    group = _patient_group(distributed.group.WORLD)
    if not state.is_local_main_process:
        distributed.barrier(group)
    try:
        yield
    finally:
        # Also after an error, or the others would wait forever.
        if state.is_local_main_process:
            distributed.barrier(group)


def meet() -> None:
    """Wait for all processes, however long the slowest takes."""
    if PartialState().num_processes > 1:
        distributed.barrier(_patient_group(distributed.group.WORLD))


@lru_cache(maxsize=1)
def _patient_group(world: distributed.ProcessGroup) -> distributed.ProcessGroup:
    """Make a gloo group. NCCL would time out during a long wait, and keeps a core busy."""
    # One group for each world.
    group: distributed.ProcessGroup = distributed.new_group(backend="gloo", timeout=_LONGEST_WAIT)
    return group


def connect() -> PartialState:
    """Join the processes of a job, over gloo if there is no accelerator."""
    state = PartialState(cpu=is_on_cpu(), timeout=_LONGEST_WAIT)
    check_connected(state.num_processes)
    return state


def check_connected(processes: int) -> None:
    """Reject several processes that are not connected, because each would do all of the work."""
    if (started := launched_processes()) != processes:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but this one is connected to no "
            "other: start them with torchrun or accelerate launch, or unset WORLD_SIZE"
        )


def launched_processes() -> int:
    """Return the number of processes in this job, according to its launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_on_cpu() -> bool:
    """Test whether there is no accelerator, or `accelerate launch --cpu` was used."""
    # Accelerate needs it, or it would treat processes on a CPU as separate runs.
    return not torch.accelerator.is_available() or parse_flag_from_env("ACCELERATE_USE_CPU")


def cores() -> int:
    """Return the number of cores that this process may use, which may be few of a machine's."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # Only Linux has it.
        return os.cpu_count() or 1
