"""Processes of `vocagnolm score` that write one store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from store_world import DOCUMENTS, arguments, contents, server_arguments
from teacher_server import TeacherServer

from vocagnolm.store.format import SHARDS, find_faults, manifest_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    started = ForkServer("score_worker.py")
    yield started
    started.stop()


def asked(argv: list[str], directory: Path) -> dict[str, Any]:
    """A request for the command, with its log and its list of scored shards in a directory."""
    return {"argv": argv[1:], "log": str(directory / "log"), "scored": str(directory / "scored")}


def test_one_of_two_differing_jobs_is_rejected(
    processes: ForkServer, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path = tmp_path / "S"
    jobs = []
    for more in ([], ["--loss_dtype", "float32"]):
        argv = arguments(teacher, corpus, path, *more)
        jobs.append(processes.start(asked(argv, tmp_path)))
    log = tmp_path / "log"
    assert sorted(processes.wait(job) for job in jobs) == [0, 2], log.read_text()
    assert "loss_dtype was" in log.read_text()
    assert not find_faults(path, manifest_of(path)[SHARDS], by_hash=True)


def test_two_processes_share_the_work_of_a_server(
    processes: ForkServer, server: TeacherServer, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    paths = [tmp_path / "one", tmp_path / "two"]
    alone, both = (server_arguments(server, teacher, corpus, path) for path in paths)
    log, lines = tmp_path / "log", tmp_path / "scored"
    assert processes.wait(processes.start(asked(alone, tmp_path))) == 0, log.read_text()
    lines.unlink()
    job = processes.start_job(*[asked(both, tmp_path)] * 2)
    assert [processes.wait(process) for process in job] == [0, 0], log.read_text()
    scored = [line.split() for line in lines.read_text().splitlines()]
    assert sorted(int(shard) for _, shard in scored) == list(range(DOCUMENTS // 4))
    assert sorted(Counter(process for process, _ in scored).values()) == [4, 5]
    assert contents(paths[0]) == contents(paths[1])
