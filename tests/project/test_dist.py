"""What rank 0 decides for all processes, and what one process per machine does first."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from vocagnolm import cli
from vocagnolm.conventions import SharedError
from vocagnolm.shell import dist

pytestmark = pytest.mark.processes


def fail() -> None:
    raise OSError(28, "No space left on device")


def worker(rank: int, place: str) -> None:
    distributed.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=2)
    first = rank == 0
    state = SimpleNamespace(num_processes=2, is_main_process=first, is_local_main_process=first)
    dist.PartialState = lambda: state  # type: ignore[assignment, misc, return-value]
    assert dist.rank0(lambda: rank) == 0
    with pytest.raises(SharedError, match="No space left on device"):
        dist.rank0(fail)
    done = Path(place, "done")
    with suppress(ValueError), dist.machine_first():
        if first:
            time.sleep(0.3)
            done.touch()
        assert done.exists()
        raise ValueError
    distributed.barrier()


def test_rank_0_decides_and_works_first(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]


def test_one_process_decides_by_itself() -> None:
    with pytest.raises(OSError, match="No space"):
        dist.rank0(fail)


@pytest.mark.parametrize(
    ("rank", "error", "line"),
    [
        ("0", SharedError("no\nspace"), "train.py: error: no space\n"),
        ("3", SharedError("no\nspace"), ""),
        ("3", ValueError("mine"), "train.py (rank 3): error: mine\n"),
    ],
)
def test_error_is_printed_once_and_that_of_one_process_with_its_rank(
    rank: str,
    error: ValueError,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    assert cli.stop("train.py", error, cli.Exit.WRONG) == cli.Exit.WRONG
    assert capsys.readouterr().err == line
    assert bool(waits) == (rank != "0")
