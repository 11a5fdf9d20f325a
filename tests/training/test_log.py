"""The log of a run: one aligned line for each entry, and the whole record in a file."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from world import MAX_LENGTH, make_trainer

from vocagnolm.run.parser import parse
from vocagnolm.training import log
from vocagnolm.training.log import LOG_FILE, RunLog
from vocagnolm.training.metrics import GuidanceMetrics

ENTRY = {"loss": 1.7, "selected_fraction": 0.4}


class Run:
    """A run of 100 steps that logs."""

    def __init__(self, directory: Path):
        self.log, self.now_s = RunLog(), 100.0
        self.state: Any = SimpleNamespace(global_step=0, max_steps=100, log_history=[])
        self.state.is_world_process_zero = True
        self.args = SimpleNamespace(output_dir=directory, global_batch_tokens=2048)

    def begin(self) -> None:
        self.log.on_train_begin(self.args, self.state, None)

    def step(self, step: int, entry: dict[str, Any]) -> None:
        """Reach a step, after half a second for each, and log an entry."""
        self.now_s += 0.5 * (step - self.state.global_step)
        self.state.global_step = step
        self.state.log_history.append(entry)
        self.log.on_log(self.args, self.state, None, logs={})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path)
    monkeypatch.setattr(log.time, "monotonic", lambda: made.now_s)
    return made


def test_teacher_that_is_seldom_ahead_is_warned_of_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for step, ahead in enumerate((0.9, 0.26, 0.124, 0.1)):
        run.step(step, ENTRY | {"teacher_ahead_fraction": ahead})
    (message,) = caplog.messages
    assert message.startswith("step 2: ")
    assert "12 %" in message


def test_time_left_counts_from_the_resumed_step_with_those_that_were_skipped(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.state.global_step, run.state.max_steps = 50, 150
    run.begin()
    run.step(60, {"selected_fraction": 0.0, "skipped_steps": 2})
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == "60 123k - - - 0.0% - - 0.00 00:45 2 steps skipped".split()


def test_file_holds_the_history_when_a_run_is_resumed(run: Run, tmp_path: Path) -> None:
    run.begin()
    for step in (1, 2, 3):
        run.step(step, ENTRY | {"step": step})
    (tmp_path / LOG_FILE).open("a").write('{"cut')
    run.state.log_history = run.state.log_history[:2]
    run.begin()
    run.step(3, ENTRY | {"step": 3, "loss": 9.0})
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert rows == run.state.log_history
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_other_processes_print_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.state.is_world_process_zero = False
    run.begin()
    run.step(1, ENTRY)
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])


def metrics_of(processes: int) -> list[Any]:
    """The metrics of each process, which add up what all of them have kept."""
    found: list[Any] = []
    for index in range(processes):
        accelerator: Any = SimpleNamespace(
            num_processes=processes,
            process_index=index,
            device=torch.device("cpu"),
            reduce=lambda own, how: sum(each._kept for each in found) if found[1:] else own,
        )
        found.append(GuidanceMetrics(accelerator))
    return found


def test_sums_are_of_the_kept_steps_since_the_last_log() -> None:
    (metrics,), mapped_BS = metrics_of(1), torch.ones(1, 3, dtype=torch.bool)

    def add(block: int) -> None:
        excess_BS, block_B = torch.full((1, 3), float(block)), torch.tensor([block])
        metrics.add_teacher(excess_BS, mapped_BS, block_B)
        metrics.add_excess(excess_BS, mapped_BS)

    add(1)
    metrics.keep_step()
    metrics.read()
    add(0)
    metrics.drop_step()
    add(2)
    metrics.keep_step()
    report = metrics.read()
    assert (report["teacher_loss_nats"], report["teacher_ahead_fraction"]) == (2, 1)


def test_sums_are_restored_by_any_number_of_processes(tmp_path: Path) -> None:
    mapped_BS = torch.ones(1, 3, dtype=torch.bool)
    for process, each in enumerate(metrics_of(2)):
        excess_BS, block_B = torch.full((1, 3), float(process)), torch.tensor([process])
        each.add_loss(excess_BS)
        each.add_student(excess_BS, mapped_BS, mapped_BS, block_B)
        each.add_teacher(excess_BS, mapped_BS, block_B)
        each.add_excess(excess_BS, mapped_BS)
        each.keep_step()
        each.drop_step()
        each.save(tmp_path)
    for processes in (1, 2, 3):
        first, *others = metrics_of(processes)
        for each in (first, *others):
            each.restore(tmp_path)
            assert each.bad_steps == 1
        report = first.read()
        assert (report["loss"], report["skipped_steps"]) == (1.5, 1.0)
        assert (report["student_loss_nats"], report["teacher_loss_nats"]) == (0.5, 0.5)
        assert report["teacher_ahead_fraction"] == 0.5


def test_mean_loss_is_over_steps_that_made_an_update() -> None:
    history = [
        {"step": 4.0, "selected_fraction": 0.4, "loss": 2.0, "skipped_steps": 2.0},
        {"step": 4.0, "eval_loss": 9.0},
        {"step": 6.0, "mean_weight": 0.4, "loss": 1.0},  # by acceptance
    ]
    (metrics,) = metrics_of(1)
    metrics.add_loss(torch.tensor(3.0))
    metrics.keep_step()
    assert metrics.mean_loss(history) == (2 * 2 + 2 * 1 + 3) / 5


def test_trainer_prints_its_log_in_lines(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, max_steps=2, disable_tqdm=False)
    trainer.train()
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    _, *lines = captured.out.splitlines()
    first, last = str(8 * MAX_LENGTH), str(2 * 8 * MAX_LENGTH)
    assert [line.split()[:2] for line in lines] == [["1", first], ["2", last]]
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert rows == trainer.state.log_history


@pytest.mark.parametrize(
    ("steps", "every", "shown"), [(8, 10, [*range(1, 9)]), (12, 10, [12]), (4, 2, [4])]
)
def test_last_step_is_logged_and_each_of_a_short_run(
    steps: int, every: int, shown: list[int], run: Run
) -> None:
    """Beside what Trainer logs itself."""
    run.state.max_steps, run.state.logging_steps = steps, every
    for strategy, expected in (("steps", shown), ("no", [])):
        args, found = SimpleNamespace(logging_strategy=strategy), []
        for step in range(1, steps + 1):
            run.state.global_step = step
            control: Any = SimpleNamespace(should_log=False)
            run.log.on_step_end(args, run.state, control)
            found += [step] * control.should_log
        assert found == expected


def test_terminal_has_a_bar_with_the_time_left_and_a_file_has_none(
    blocks: Any, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    line = ["--config", "demo", "--teacher", "t"]
    assert parse(line).args.disable_tqdm
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert not parse(line).args.disable_tqdm
        make_trainer(tmp_path, blocks, *pair, max_steps=2, disable_tqdm=None).train()
        shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert re.search(r"\d/2 \[\d\d:\d\d<\d\d:\d\d,", shown)
