"""Completing the records of an evaluation: with scripted answers, several processes, and kills."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from vocagnolm.evaluation.engines.generation import Completion
from vocagnolm.evaluation.grading.grading import Verdict
from vocagnolm.evaluation.records import EvaluationDirectory
from vocagnolm.evaluation.runner import _share, run
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, Item
from vocagnolm.evaluation.tasks.tasks import Sampling, Task, build_prompt, seed_of, text_sha256

N_ITEMS = 23


def make_task(name: str = "gsm8k", n: int = N_ITEMS, sampling: Sampling | None = None) -> Task:
    items = [Item(idx, f"{name} {idx}" + "?" * (idx % 7), str(idx)) for idx in range(n)]
    prompts = {item.idx: build_prompt(BENCHMARKS[name], "", item.question) for item in items}
    return Task(BENCHMARKS[name], items, prompts, {}, None, sampling)


@dataclass
class ScriptedEngine:
    """Answers every prompt with its length, in shuffled groups; remembers what it was asked.

    A prompt whose answer is drawn gets its seed at the end.
    """

    seed: int = 0
    longest: int = 10_000  # characters
    dies_after: int = 10_000  # prompts
    asked: list[str] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[str], stops: Any, length: int, sampling: Any, seeds: Sequence[int]
    ) -> Iterator[list[Completion]]:
        if any(len(prompt) > self.longest for prompt in prompts):
            raise ValueError("a prompt leaves no room")
        if sampling:
            prompts = [f"{prompt} {seed}" for prompt, seed in zip(prompts, seeds, strict=True)]
        return self._run(prompts)

    def _run(self, prompts: Sequence[str]) -> Iterator[list[Completion]]:
        rng = random.Random(self.seed)
        order = rng.sample(range(len(prompts)), len(prompts))
        while order:
            group, order = order[: (size := rng.randint(1, 4))], order[size:]
            if len(self.asked) + len(group) > self.dies_after:
                raise KeyboardInterrupt
            self.asked += [prompts[index] for index in group]
            completions = []
            for index in group:
                length = len(prompts[index])
                text = f"The answer is {length}."
                completions.append(Completion(index, text, length, 3, "stop"))
            yield completions


class InstantGrader:
    """Says "right" where the gold is even."""

    def grade(self, kind: Any, answers: Sequence[tuple[str, str]]) -> Iterator[Verdict]:
        for output, gold in answers:
            yield Verdict(output[-3:], int(gold) % 2 == 0, "string")


@dataclass
class FakeState:
    """One of several processes, which does not wait for the others."""

    process_index: int = 0
    num_processes: int = 1

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    def wait_for_everyone(self) -> None:
        pass


def run_all(tasks: Sequence[Task], engine: Any, path: Path, state: Any = None) -> list[str]:
    done = run(tasks, engine, InstantGrader(), EvaluationDirectory(path), state or FakeState())
    return [task.benchmark.id for task in done]


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.glob("*.jsonl"))}


SAMPLINGS = [None, Sampling(samples=3, temperature=0.6)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_run_records_every_output_once(tmp_path: Path, sampling: Sampling | None) -> None:
    tasks = [make_task("gsm8k", 7, sampling), make_task("math", 5, sampling)]
    engine = ScriptedEngine()
    assert run_all(tasks, engine, tmp_path) == ["gsm8k", "math"]
    assert len(engine.asked) == len(set(engine.asked)) == (36 if sampling else 12)
    assert set(files(tmp_path)) == {"gsm8k.jsonl", "math.jsonl"}
    lines = files(tmp_path)["gsm8k.jsonl"].splitlines()
    for (item, sample), line in zip(tasks[0].outputs(), lines, strict=True):
        prompt = tasks[0].prompts[item.idx]
        seed = f" {seed_of('gsm8k', item.idx, sample)}" if sampling else ""
        output = f"The answer is {len(prompt + seed)}."
        expected = {
            "benchmark": "gsm8k",
            "idx": item.idx,
            "question": item.question,
            "prompt_sha256": text_sha256(prompt),
            "n_prompt_tokens": len(prompt + seed),
            "n_new_tokens": 3,
            "finish_reason": "stop",
            "raw_output": output,
            "gold": item.gold,
            **asdict(Verdict(output[-3:], item.idx % 2 == 0, "string")),
        }
        assert json.loads(line) == expected | ({"sample": sample} if sampling else {})


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_run_asks_only_what_is_missing(tmp_path: Path, sampling: Sampling | None) -> None:
    tasks = [make_task("gsm8k", N_ITEMS, sampling), make_task("math", 9, sampling)]
    resumed = tmp_path / "resumed"
    run_all(tasks, ScriptedEngine(), tmp_path / "whole")
    first, second, third = ScriptedEngine(1, dies_after=10), ScriptedEngine(2), ScriptedEngine(3)
    with pytest.raises(KeyboardInterrupt):
        run_all(tasks, first, resumed)
    assert 0 < len(EvaluationDirectory(resumed).finished("gsm8k")) == len(first.asked) <= 10
    run_all(tasks, second, resumed)
    assert not set(first.asked) & set(second.asked)
    assert len(first.asked) + len(second.asked) == sum(len(task.outputs()) for task in tasks)
    run_all(tasks, third, resumed)
    assert third.asked == []
    assert files(resumed) == files(tmp_path / "whole")


def test_records_are_on_disk(tmp_path: Path) -> None:
    seen = []

    class WatchedEngine(ScriptedEngine):
        def _run(self, prompts: Sequence[str]) -> Iterator[list[Completion]]:
            for group in super()._run(prompts):
                written = len(EvaluationDirectory(tmp_path).finished("gsm8k"))
                # All but this group, which the grader has not seen.
                seen.append((written, len(self.asked) - len(group)))
                yield group

    run_all([make_task()], WatchedEngine(), tmp_path)
    assert seen
    assert all(written == asked for written, asked in seen)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_processes_share_all_items_evenly(tmp_path: Path, processes: int) -> None:
    task, shares = make_task("gsm8k", sampling=SAMPLINGS[1]), []
    for index in range(processes):
        share = _share(task, EvaluationDirectory(tmp_path), FakeState(index, processes))
        lengths = [len(item.question) for item, _ in share]
        assert lengths == sorted(lengths, reverse=True)
        assert len(share) - 3 * N_ITEMS // processes in (0, 1)
        shares += [(item.idx, sample) for item, sample in share]
    assert sorted(shares) == [(item.idx, sample) for item, sample in task.outputs()]


def test_prompts_that_cannot_be_asked_are_rejected_before_any_is(tmp_path: Path) -> None:
    tasks = [make_task("gsm8k"), make_task("math", 5)]
    longest = max(len(prompt) for prompt in tasks[1].prompts.values())
    engine = ScriptedEngine(longest=longest - 1)
    with pytest.raises(ValueError, match="no room"):
        run_all(tasks, engine, tmp_path)
    assert files(tmp_path) == {}
    run_all(tasks[:1], ScriptedEngine(), tmp_path)
    # Records of another benchmark, and of another evaluator.
    (tmp_path / "gsm8k.jsonl").rename(tmp_path / "svamp.jsonl")
    (tmp_path / "math.jsonl").write_text('{"idx": 0, "gold": "1", "raw_output": "1"}\n')
    for name in ("svamp", "math"):
        with pytest.raises(ValueError, match=f"of {name}, .*another prompt"):
            run_all([make_task(name)], engine, tmp_path)
    assert engine.asked == []


# Real processes


@pytest.fixture(scope="module")
def launcher() -> Iterator[ForkServer]:
    started = ForkServer("eval_worker.py")
    yield started
    started.stop()


def asked(arguments: list[str], path: Path, log: Path) -> dict[str, Any]:
    return {"argv": [*arguments, str(path)], "log": str(log)}


@pytest.fixture(scope="module")
def arguments(talker: Path) -> list[str]:
    """Arguments that ask 40 items of a tiny model that answers each differently."""
    options = ["--benchmarks", "demo", "--limit", "40", "--batch_size", "2"]
    return ["--model", str(talker), *options, "--output_dir"]


@pytest.fixture(scope="module")
def uninterrupted(
    launcher: ForkServer, arguments: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("uninterrupted")
    log = path / "run.log"
    assert launcher.wait(launcher.start(asked(arguments, path, log))) == 0, log.read_text()
    outputs = [json.loads(line)["raw_output"] for line in files(path)["demo.jsonl"].splitlines()]
    assert len(outputs) == 40
    assert len(set(outputs)) > 30, "they are all alike"
    return path


def size_of_items(path: Path) -> int:
    try:
        return sum(map(len, files(path).values()))
    except FileNotFoundError:  # just put in order
        return 0


def kill_when_written(process: int, path: Path, size: int, delay: float) -> None:
    """SIGKILL a process a moment after `size` bytes of items are written, or all items."""
    deadline = time.monotonic() + 60
    while size_of_items(path) < size and not (path / "demo.jsonl").exists():
        assert time.monotonic() < deadline, "the process does not come on"
        time.sleep(0.0002)
    time.sleep(delay)
    os.kill(process, signal.SIGKILL)


@pytest.mark.processes
@pytest.mark.slow
def test_items_are_the_same_after_kills(
    launcher: ForkServer, arguments: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    rng = random.Random(0)
    path, log = tmp_path / "killed", tmp_path / "log"
    total = sum(map(len, files(uninterrupted).values()))
    statuses, seen = [], []
    kills = int(os.environ.get("VOCAGNOLM_KILLS", "4"))
    for kill in range(kills):
        # Bytes, until the next kill.
        more = rng.uniform(0, total / (kills - 2)) if kill < kills - 1 else total
        process = launcher.start(asked(arguments, path, log))
        kill_when_written(process, path, size_of_items(path) + int(more), rng.uniform(0, 0.004))
        statuses.append(launcher.wait(process))
        seen.append(len(EvaluationDirectory(path).finished("demo")))
    assert statuses.count(-signal.SIGKILL) >= kills - 1, log.read_text()
    assert len(set(seen) - {0, 40}) >= min(3, kills - 2), f"killed at {seen} items"
    assert seen == sorted(seen)
    assert launcher.wait(launcher.start(asked(arguments, path, log))) == 0, log.read_text()
    for name in ("demo.jsonl", "row.md", "settings.json"):
        assert (path / name).read_bytes() == (uninterrupted / name).read_bytes()


@pytest.mark.processes
def test_two_real_processes_give_the_same_items(
    launcher: ForkServer, arguments: list[str], uninterrupted: Path, tmp_path: Path
) -> None:
    path, files_of = tmp_path / "shared", [tmp_path / f"log{rank}" for rank in range(2)]
    started = launcher.start_job(*(asked(arguments, path, log) for log in files_of))
    statuses = [launcher.wait(process) for process in started]
    logs = [log.read_text() for log in files_of]
    assert statuses == [0, 0], "\n".join(logs)
    assert files(path) == files(uninterrupted)
    assert "demo: 0.0 (95 %" in logs[0]
    assert "| Demo |" in logs[0]
    assert "demo" not in logs[1].lower()
