"""Whatever happens to a run, it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fork_server import ForkServer
from world import TIMING_KEYS, World, make_world

from vocagnolm.training.run_directory import checkpoint_fault, newest_checkpoint

pytestmark = pytest.mark.processes

# VOCAGNOLM_KILLS=30 tests more; every killed run ended like an unharmed one.
KILLS = int(os.environ.get("VOCAGNOLM_KILLS", "4"))
STEPS = 8


OPTIONS = {
    "max_length": "48",
    "global_batch_tokens": "192",
    "per_device_train_batch_size": "1",
    "max_steps": f"{STEPS}",
    "save_steps": "3",
    "logging_steps": "2",  # a checkpoint falls between two logs
    "learning_rate": "1e-2",
    "eval_fraction": "0.1",
    "eval_steps": "5",
    "use_cpu": "True",
    "disable_tqdm": "True",
}


@dataclass(frozen=True)
class Place:
    """A directory for runs, with a corpus and two models."""

    world: World
    server: ForkServer

    @property
    def root(self) -> Path:
        return self.world.root

    def run(self, out: Path, changes: dict[str, str] | None = None, **request: Any) -> int:
        """Run one process; return its exit status."""
        return self.server.wait(self.server.start(self._asked(out, changes or {}, request)))

    def run_two(self, out: Path, *requests: dict[str, Any], **changes: str) -> list[int]:
        """Run two processes, each with its own request; return their exit statuses."""
        first, second = requests or ({}, {})
        asked = self._asked(out, changes, first, "-0"), self._asked(out, changes, second, "-1")
        return [self.server.wait(process) for process in self.server.start_job(*asked)]

    def _asked(
        self, out: Path, changes: dict[str, str], request: dict[str, Any], rank: str = ""
    ) -> dict[str, Any]:
        argv = self.world.argv(str(out), **OPTIONS | changes)
        return {"argv": argv, "log": f"{out}{rank}.log", "events": f"{out}{rank}.events", **request}


@pytest.fixture(scope="module")
def place(
    tiny_llama: Callable[..., Any],
    tokenizer_dirs: dict[str, Path],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("survival")
    dropout = {"attention_dropout": 0.1}  # it needs random states
    world = make_world(root, tiny_llama, tokenizer_dirs, training_texts[:40], **dropout)
    server = ForkServer("survival_worker.py", HF_DATASETS_CACHE=str(root / "cache"))
    yield Place(world, server)
    server.stop()


def history(out: Path) -> list[dict[str, Any]]:
    """The log of a finished run, without what depends on the clock."""
    state = json.loads((out / "trainer_state.json").read_text())
    return [
        {key: value for key, value in entry.items() if key not in TIMING_KEYS}
        for entry in state["log_history"]
    ]


def timed_events(out: Path) -> list[list[str]]:
    return [line.split(" ", 1) for line in out.with_suffix(".events").read_text().splitlines()]


def events(out: Path) -> list[str]:
    """The events that happen again in a like run: aligned documents are written only once."""
    names = [name for _, name in timed_events(out)]
    loading = [n for n, name in enumerate(names) if name.startswith(("read_corpora", "pack_doc"))]
    return [names[n] for n in loading] + names[loading[-1] + 1 :]


def log(out: Path) -> str:
    return "".join(path.read_text() for path in sorted(out.parent.glob(f"{out.stem}*.log")))


def assert_same_run(ours: Path, theirs: Path) -> None:
    assert history(ours) == history(theirs)
    first, second = ((out / "model.safetensors").read_bytes() for out in (ours, theirs))
    assert first == second


@pytest.fixture(scope="module")
def whole(place: Place) -> Path:
    """An undisturbed run."""
    out = place.root / "whole"
    assert place.run(out) == 0
    return out


@pytest.mark.slow
def test_run_ends_alike_when_it_is_killed_anywhere(whole: Path, place: Place) -> None:
    moments = random.Random(7)
    times, happened = zip(*timed_events(whole), strict=True)
    saves = [n for n, name in enumerate(happened) if "load" not in name and "loss" not in name]
    for number in range(KILLS):
        out = place.root / f"killed{number}"
        # At an event of a save, at any event, or at any time.
        at = moments.choice((saves, range(len(happened)))[number % 2])
        after_s = moments.uniform(0, float(times[-1]) - float(times[0]))
        status = place.run(
            out, signal="SIGKILL", **({"at": [at]} if number % 4 else {"after_s": after_s})
        )
        assert status == -signal.SIGKILL or (status == 0 and number % 4 == 0), log(out)
        if status:  # otherwise it ended before the kill
            assert place.run(out) == 0, log(out)
        assert_same_run(out, whole)
        assert "Traceback" not in log(out)


# Signals


@pytest.fixture(scope="module")
def whole_two(place: Place) -> Path:
    """An undisturbed run of two processes."""
    out = place.root / "whole_two"
    assert place.run_two(out) == [0, 0], log(out)
    return out


def steps_at(happened: list[str]) -> list[int]:
    """The numbers of the events that begin the optimizer steps."""
    losses = [n for n, name in enumerate(happened) if name == "compute_loss begins"]
    return losses[:: len(losses) // STEPS]


@pytest.mark.slow
def test_both_processes_stop_at_one_step(whole_two: Path, place: Place) -> None:
    moments = random.Random(11)
    happened = [events(whole_two.with_name(f"whole_two-{rank}")) for rank in (0, 1)]
    for number in range(KILLS if KILLS > 4 else 2):
        out, rank = place.root / f"stopped{number}", moments.randrange(2)
        requests: list[dict[str, Any]] = [{}, {}]
        first, *_, last = steps_at(happened[rank])
        at = moments.randrange(first, last)
        requests[rank] = {"signal": ("SIGTERM", "SIGUSR1", "SIGINT")[number % 3], "at": [at]}
        assert place.run_two(out, *requests) == [75, 75], log(out)
        (step,) = re.findall(rf"stopped after step (\d+) of {STEPS}", log(out))
        assert newest_checkpoint(out) == str(out / f"checkpoint-{step}")
        assert all(checkpoint_fault(path) is None for path in out.glob("checkpoint-*"))
        assert not (out / "model.safetensors").exists()
        assert place.run_two(out) == [0, 0], log(out)
        assert_same_run(out, whole_two)


@pytest.mark.slow
def test_sharded_run_ends_alike_when_it_is_stopped(place: Place) -> None:
    whole, out = place.root / "sharded", place.root / "sharded-stopped"
    sharding = {"break": [["fsdp", 2]]}
    assert place.run_two(whole, sharding, sharding, use_cpu="False") == [0, 0], log(whole)
    at = steps_at(events(whole.with_name("sharded-1")))[4]
    stopped = {**sharding, "signal": "SIGUSR1", "at": [at]}
    assert place.run_two(out, sharding, stopped, use_cpu="False") == [75, 75], log(out)
    assert (out / "checkpoint-5" / "pytorch_model_fsdp_0").is_dir()
    assert place.run_two(out, sharding, sharding, use_cpu="False") == [0, 0], log(out)
    assert_same_run(out, whole)


@pytest.mark.slow
def test_run_ends_alike_when_stopped_at_epoch_end(place: Place) -> None:
    changes = dict.fromkeys(("save_strategy", "logging_strategy", "eval_strategy"), "epoch")
    changes |= {"max_steps": "-1", "num_train_epochs": "4"}
    changes |= {"global_batch_tokens": f"{16 * 48}", "per_device_train_batch_size": "4"}
    whole, out = place.root / "epochs", place.root / "epochs-stopped"
    assert place.run(whole, changes) == 0
    assert [entry["step"] for entry in history(whole) if "loss" in entry] == [1, 2, 4, 6, 8]
    losses = [n for n, name in enumerate(events(whole)) if name == "compute_loss begins"]
    # The second of two steps of the second epoch; each has four micro-batches.
    assert place.run(out, changes, signal="SIGTERM", at=[losses[3 * 4]]) == 75, log(out)
    assert newest_checkpoint(out) == str(out / "checkpoint-4")
    assert place.run(out, changes) == 0, log(out)
    assert_same_run(out, whole)


def test_run_stops_at_once_when_interrupted_twice(whole: Path, place: Place) -> None:
    out = place.root / "interrupted"
    first = steps_at(events(whole))[4]
    assert place.run(out, signal="SIGINT", at=[first, first + 1]) == 130
    assert "SIGINT: " in log(out)
    assert newest_checkpoint(out) == str(out / "checkpoint-3")
    assert place.run(out) == 0
    assert_same_run(out, whole)


@pytest.mark.slow
def test_processes_wait_beyond_their_timeout_for_alignment(place: Place) -> None:
    out = place.root / "patient"
    slow = {"break": [["slow", 4]]}
    assert place.run_two(out, slow, slow, ddp_timeout="2", max_steps="1") == [0, 0], log(out)


# Another number of processes


def test_run_resumes_with_another_number_of_processes(whole_two: Path, place: Place) -> None:
    out = place.root / "alone"
    at = steps_at(events(whole_two.with_name("whole_two-0")))[4]
    assert place.run_two(out, {"signal": "SIGTERM", "at": [at]}, {}) == [75, 75]
    assert place.run(out) == 0, log(out)
    ours, theirs = history(out), history(whole_two)
    assert [entry["step"] for entry in ours] == [entry["step"] for entry in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=0.05)  # dropout
    # The step before the checkpoint, not yet logged, is not lost.
    mine, other = (next(e for e in run if e["step"] == 6) for run in (ours, theirs))
    assert mine["selected_fraction"] == other["selected_fraction"]
    assert mine["teacher_loss_nats"] == pytest.approx(other["teacher_loss_nats"], rel=1e-6)


# Numbers that go bad


@pytest.mark.slow
def test_nan_losses_in_one_process_skip_the_step(whole_two: Path, place: Place) -> None:
    out, broken = place.root / "skipped", {"break": [["nan", 4, "1"], ["nan", 5, "1"]]}
    assert place.run_two(out, broken, broken, max_bad_steps="2") == [0, 0], log(out)
    steps = re.findall(r"step (\d): .* NaN .* --max_bad_steps 2\)", log(out))
    assert steps == ["4", "5"]
    ours, theirs = history(out), history(whole_two)
    assert ours[:2] == theirs[:2]
    skipped = {entry["step"]: entry.get("skipped_steps") for entry in ours if "loss" in entry}
    assert skipped == {1: None, 2: None, 4: 1.0, 6: 1.0, 8: None}
    assert all(np.isfinite(value) for entry in ours for value in entry.values())
    assert ours[-1]["train_loss"] < ours[0]["loss"]


@pytest.mark.slow
def test_run_without_any_update_saves_no_model(place: Place) -> None:
    out, broken = place.root / "none", {"break": [["nan", 1, "0"], ["nan", 2, "0"]]}
    assert place.run(out, {"max_bad_steps": "2", "max_steps": "2"}, **broken) == 3, log(out)
    assert re.search(r"error: none .*--max_bad_steps 2\)", log(out))
    assert not (out / "README.md").exists()


@pytest.mark.slow
def test_run_stops_after_too_many_bad_steps(whole: Path, place: Place) -> None:
    out, broken = place.root / "bad", {"break": [["nan", 4, "0"], ["nan", 5, "0"]]}
    assert place.run(out, {"max_bad_steps": "1"}, **broken) == 3
    assert re.search(rf"step 5: .* no update .*{out}/checkpoint-4", log(out))
    assert place.run(out, {"max_bad_steps": "1"}, **broken) == 3  # it still counts the first
    assert place.run(out, {"max_bad_steps": "2"}, **broken) == 0, log(out)
    entries = [entry for entry in history(out) if "loss" in entry]
    assert [entry.get("skipped_steps") for entry in entries] == [None, None, 1.0, 1.0, None]


def test_finished_run_is_written_again_when_it_is_damaged(whole: Path, place: Place) -> None:
    out = place.root / "damaged"
    shutil.copytree(whole, out)
    assert place.run(out) == 0
    assert "finished run" in log(out)
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    assert place.run(out) == 0
    assert_same_run(out, whole)
