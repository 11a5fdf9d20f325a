"""The log of a run: one aligned line for each entry, and the whole record in a file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from world import MAX_LENGTH, make_trainer

from vocagnolm.training import log
from vocagnolm.training.log import LOG_FILE, RunLog
from vocagnolm.training.metrics import GuidanceMetrics

ENTRY = {"loss": 1.70214, "student_loss_nats": 4.25, "teacher_loss_nats": 2.1, "step": 10}
ENTRY |= {"selected_fraction": 0.405, "tokens_per_s": 128_400.0}
ENTRY |= {"learning_rate": 8e-5, "grad_norm": 0.98765}
# Entries, and their lines without the alignment.
LINES: list[tuple[dict[str, Any], str]] = [
    (ENTRY, "10 20.5k 1.7021 4.2500 2.1000 40.5% 8.0e-05 0.988 128k 00:45"),
    (
        {"selected_fraction": 0.0, "skipped_steps": 2},
        "10 20.5k - - - 0.0% - - 0.00 00:45 2 steps skipped",
    ),
    (
        {"loss": 1e4, "student_loss_nats": 1e4, "selected_fraction": 1.0, "grad_norm": 1.2345e6},
        "10 20.5k 10000.0000 10000.0000 - 100.0% - 1.23e+06 0.00 00:45",
    ),
    ({"eval_loss": 2.25, "eval_runtime": 3.0, "epoch": 1}, "10 20.5k eval_loss 2.2500"),
]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunLog, SimpleNamespace, SimpleNamespace, list[float]]:
    """A log, the arguments and the state of a run of 100 steps, and its clock."""
    clock = [100.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: clock[0])
    state = SimpleNamespace(
        global_step=0, max_steps=100, log_history=[], is_world_process_zero=True
    )
    args = SimpleNamespace(output_dir=tmp_path, global_batch_tokens=2048)
    return RunLog(), args, state, clock


def print_main(run: Any, step: int, entry: dict[str, Any]) -> None:
    told, args, state, clock = run
    clock[0] += 0.5 * (step - state.global_step)
    state.global_step = step
    state.log_history.append(entry)
    told.on_log(args, state, None, logs={})


@pytest.mark.parametrize(("entry", "line"), LINES)
def test_entry_is_one_aligned_line(
    entry: dict[str, Any], line: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told, args, state, _ = run
    told.on_train_begin(args, state, None)
    print_main(run, 10, entry)
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == line.split()


def test_teacher_that_is_seldom_ahead_is_warned_of_once(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for step, ahead in enumerate((0.9, 0.26, 0.124, 0.1)):
        print_main(run, step, ENTRY | {"teacher_ahead_fraction": ahead})
    (message,) = caplog.messages
    assert message.startswith("step 2: the teacher's loss is below the student's on only 12 %")


def test_time_left_counts_from_the_resumed_step(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told, args, state, _ = run
    state.global_step, state.max_steps = 50, 150
    told.on_train_begin(args, state, None)
    print_main(run, 60, ENTRY)
    assert capsys.readouterr().out.split("128k")[1].strip() == "00:45"


def test_file_holds_the_history_when_a_run_is_resumed(run: Any, tmp_path: Path) -> None:
    told, args, state, _ = run
    told.on_train_begin(args, state, None)
    for step in (1, 2, 3):
        print_main(run, step, ENTRY | {"step": step})
    (tmp_path / LOG_FILE).open("a").write('{"cut')
    state.log_history = state.log_history[:2]
    told.on_train_begin(args, state, None)
    print_main(run, 3, ENTRY | {"step": 3, "loss": 9.0})
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert rows == state.log_history
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_other_processes_print_nothing(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, args, state, _ = run
    state.is_world_process_zero = False
    told.on_train_begin(args, state, None)
    print_main(run, 1, ENTRY)
    assert (capsys.readouterr().out, list(tmp_path.iterdir())) == ("", [])


def test_sums_are_of_the_kept_steps_since_the_last_log() -> None:
    one: dict[str, Any] = {"num_processes": 1, "process_index": 0, "device": torch.device("cpu")}
    same = SimpleNamespace(**one, reduce=lambda sums, how: sums)
    metrics, mapped_BS = GuidanceMetrics(same), torch.ones(1, 3, dtype=torch.bool)  # type: ignore[arg-type]

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


def metrics_of(processes: int) -> list[Any]:
    """The metrics of each process, which add up what all of them have kept."""
    found: list[Any] = []
    for index in range(processes):
        accelerator: Any = SimpleNamespace(
            num_processes=processes,
            process_index=index,
            device=torch.device("cpu"),
            reduce=lambda sums, how: sum(each._kept for each in found),
        )
        found.append(GuidanceMetrics(accelerator))
    return found


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
    accelerator: Any = SimpleNamespace(
        num_processes=1,
        process_index=0,
        device=torch.device("cpu"),
        reduce=lambda total, how: total,
    )
    metrics = GuidanceMetrics(accelerator)
    metrics.add_loss(torch.tensor(3.0))
    metrics.keep_step()
    assert metrics.mean_loss(history) == (2 * 2 + 2 * 1 + 3) / 5


@pytest.mark.parametrize("bar", [False, True])
def test_trainer_prints_its_log_in_lines(
    bar: bool,
    blocks: Any,
    pair: tuple[Any, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = make_trainer(tmp_path, blocks, *pair, max_steps=2, disable_tqdm=not bar)
    trainer.train()
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split() == "step tokens loss student teacher kept lr grad tok/s left".split()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["1", str(8 * MAX_LENGTH)],
        ["2", str(2 * 8 * MAX_LENGTH)],
        ["2", str(2 * 8 * MAX_LENGTH)],
    ]
    assert lines[-1].split()[2] == "train_loss"
    assert ("2/2" in captured.err) == bar
    rows = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert rows == trainer.state.log_history
