"""Processes of `vocagnolm score` that write one store, or are killed as a server answers."""

from __future__ import annotations

import os
import signal
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
    job = processes.start_two(*[asked(both, tmp_path)] * 2)
    assert [processes.wait(process) for process in job] == [0, 0], log.read_text()
    scored = [line.split() for line in lines.read_text().splitlines()]
    assert sorted(int(shard) for _, shard in scored) == list(range(DOCUMENTS // 4))
    assert sorted(Counter(process for process, _ in scored).values()) == [4, 5]
    assert contents(paths[0]) == contents(paths[1])


def test_killed_process_has_kept_every_answer_of_a_server(
    processes: ForkServer, server: TeacherServer, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    started = list[int]()

    def run(directory: str) -> int:
        argv = server_arguments(server, teacher, corpus, tmp_path / directory)
        argv += ["--concurrency", "3", "--shard_documents", "100"]
        started.append(processes.start(asked(argv, tmp_path)))
        return processes.wait(started[-1])

    def kill(number: int) -> None:
        if number in (20, 40):
            os.kill(started[-1], signal.SIGKILL)

    server.plan = kill
    log = tmp_path / "log"
    assert [run("killed"), run("killed"), run("killed")] == [-9, -9, 0], log.read_text()
    first = Counter(tuple(body["prompt"]) for body in server.bodies)
    server.bodies.clear()
    server.plan = lambda number: None
    assert run("whole") == 0
    # Each of two kills repeats three requests in flight, and the prompt of the search.
    again = first - Counter(tuple(body["prompt"]) for body in server.bodies)
    assert again.total() <= 2 * (3 + 1)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not [*tmp_path.glob("killed/.*")]
