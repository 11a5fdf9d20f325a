"""Processes of `vocagnolm score` that are killed, or write one store at once."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from score_world import (
    DOCUMENTS,
    arguments,
    contents,
    server_arguments,
)
from teacher_server import TeacherServer

from vocagnolm.store.format import SHARDS, find_faults, manifest_of, read_manifest

pytestmark = pytest.mark.processes

KILLS = int(os.environ.get("VOCAGNOLM_KILLS", "4"))  # 50 take half a minute


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    started = ForkServer("score_worker.py")
    yield started
    started.stop()


def asked(argv: list[str], log: Path, scored: Path) -> dict[str, Any]:
    return {"argv": argv, "log": str(log), "scored": str(scored)}


def kill(process: int) -> None:
    """SIGKILL a process that has not been waited for, whether it has ended or not."""
    os.kill(process, signal.SIGKILL)


def lines_of(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def score_with_kills(
    processes: ForkServer, argv: list[str], path: Path, log: Path, scored: Path, kills: int
) -> list[list[int]]:
    """Kill both processes of a job at random moments, one after the other, and start it again.

    Returns:
        The exit statuses of each job, of which the last is not killed.
    """
    rng = random.Random(kills)
    statuses = []
    for _ in range(kills):
        began = len(lines_of(scored))
        job = processes.start_two(*[asked(argv, log, scored)] * 2)
        if rng.random() < 0.15:  # at any moment of the start
            time.sleep(rng.uniform(0, 1))
        else:  # after some lines, or at the end
            deadline, wanted = time.monotonic() + 20, began + rng.randint(0, 4)
            while time.monotonic() < deadline and len(lines_of(scored)) < wanted:
                time.sleep(0.001)
                if SHARDS in read_manifest(path):
                    break
            time.sleep(rng.uniform(0, 0.06))
        rng.shuffle(job)
        kill(job[0])
        time.sleep(rng.choice([0, 0, rng.uniform(0, 0.1)]))
        kill(job[1])
        statuses.append([processes.wait(process) for process in job])
    job = processes.start_two(*[asked(argv, log, scored)] * 2)
    statuses.append([processes.wait(process) for process in job])
    return statuses


def check_scored_once(scored: Path, shards: int) -> None:
    """Check that no written shard is begun again, and that a process loses at most its last one."""
    lines, written = lines_of(scored), set()
    for what, _, shard in lines:
        assert what == "end" or shard not in written, f"shard {shard} was scored twice"
        if what == "end":
            written.add(shard)
    assert len(written) <= shards
    begun = Counter(process for what, process, _ in lines if what == "begin")
    ended = Counter(process for what, process, _ in lines if what == "end")
    assert all(begun[process] - ended[process] <= 1 for process in begun)


@pytest.mark.slow
def test_store_is_the_same_after_many_kills(
    processes: ForkServer, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path, log, lines = tmp_path / "S", tmp_path / "log", tmp_path / "scored"
    argv = arguments(teacher, corpus, path)[1:]
    statuses = score_with_kills(processes, argv, path, log, lines, kills=KILLS)
    assert statuses[-1] == [0, 0], log.read_text()
    # A fast job may end before its kill.
    assert sum(-9 in job for job in statuses) >= KILLS // 2, statuses
    check_scored_once(lines, DOCUMENTS // 4)
    assert contents(path) == contents(scored)


def test_one_of_two_differing_jobs_is_rejected(
    processes: ForkServer, scored: Path, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    path, log = tmp_path / "S", tmp_path / "log"
    settings: list[list[str]] = [[], ["--loss_dtype", "float32"]]
    jobs = [
        processes.start(
            asked(arguments(teacher, corpus, path, *more)[1:], log, tmp_path / "scored")
        )
        for more in settings
    ]
    assert sorted(processes.wait(job) for job in jobs) == [0, 2], log.read_text()
    assert "holds another store (loss_dtype was" in log.read_text()
    assert not find_faults(path, manifest_of(path)[SHARDS], by_hash=True)


def test_two_processes_share_the_work_of_a_server(
    processes: ForkServer, server: TeacherServer, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    paths, log = [tmp_path / "one", tmp_path / "two"], tmp_path / "log"
    alone, both = (server_arguments(server, teacher, corpus, path)[1:] for path in paths)
    assert processes.wait(processes.start(asked(alone, log, tmp_path / "alone"))) == 0, (
        log.read_text()
    )
    job = processes.start_two(*[asked(both, log, tmp_path / "scored")] * 2)
    assert [processes.wait(process) for process in job] == [0, 0], log.read_text()
    check_scored_once(tmp_path / "scored", DOCUMENTS // 4)
    lines = lines_of(tmp_path / "scored")
    ended = Counter(process for what, process, _ in lines if what == "end")
    assert sorted(ended.values()) == [4, 5]
    assert contents(paths[0]) == contents(paths[1])


def test_killed_process_has_kept_every_answer_of_a_server(
    processes: ForkServer, server: TeacherServer, teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    log, started = tmp_path / "log", list[int]()

    def run(directory: str) -> int:
        argv = server_arguments(server, teacher, corpus, tmp_path / directory)
        argv += ["--concurrency", "3", "--shard_documents", "100"]
        started.append(processes.start(asked(argv[1:], log, tmp_path / "scored")))
        return processes.wait(started[-1])

    server.plan = lambda number: kill(started[-1]) if number in (20, 40) else None
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
