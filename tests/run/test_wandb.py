"""One set of names in every tracker, and the place of a run among others."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from wandb_files import PLACE, stored
from world import World

from vocagnolm.cli import Exit
from vocagnolm.report import fetch
from vocagnolm.run import parser, tracked_run
from vocagnolm.run.parser import parse
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training import tracking
from vocagnolm.training.job import settings_of

SECTIONS = ("train/", "guidance/", "teacher/", "speed/", "memory/", "eval/")


@pytest.fixture
def options(world: World) -> list[str]:
    """Options of a run of two steps, with a teacher."""
    steps = {"max_steps": "2", "logging_steps": "1", "global_batch_tokens": "128"}
    changes = {"report_to": None, "output_dir": None, "save_steps": None, "learning_rate": None}
    return [*world.argv("", **steps, **changes), "--use_cpu"]


@pytest.mark.slow
def test_trackers_hold_all_that_was_logged(
    options: list[str], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    recipe, out = tmp_path / "recipes" / "table1" / "a.yaml", tmp_path / "run"
    recipe.parent.mkdir(parents=True)
    recipe.write_text("project: lab/p\n")
    argv = [*options, f"--config={recipe}", f"--output_dir={out}"]
    assert parser.main([*argv, "--report_to", "wandb", "tensorboard"]) == 0
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    about, config = found["run"], found["config"]
    assert (about["entity"], about["project"]) == ("lab", "p")
    assert (about["run_group"], about["display_name"]) == ("table1", "table1/a")
    assert about["tags"] == ["vocagnolm", "student", "teacher"]
    settings = json.loads((out / "run.json").read_text())
    assert config["settings"] == settings
    assert config["parameters"] == config["trained_parameters"] > 0
    assert config["corpus"]["student_tokens"] > config["corpus"]["blocks"] > 0
    assert config["lr_scheduler_type"] == "cosine_with_min_lr"
    # What an evaluation continues from: test_wandb_evaluations.py.
    place = json.loads((out / "wandb_run.json").read_text())
    assert place.items() >= {"id": run.name.rpartition("-")[2], "name": "table1/a"}.items()
    assert place.keys() >= PLACE.keys()
    assert place["config"]["corpus"] == config["corpus"]

    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "student_loss_nats" in entry]
    rows = [row for row in found["history"] if "train/student_loss_nats" in row]
    for row, entry in zip(rows, logged, strict=True):
        step = entry.pop("step")
        assert row.items() >= {**tracking.tracked(entry), fetch.STEP: step}.items()
    names = {name.partition("._")[0] for row in found["history"] for name in row}
    assert "eval/loss" in names
    assert all(name.startswith((*SECTIONS, "_")) for name in names)

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    entries = {name for entry in history for name in entry} - {"step"}
    assert set(events.Tags()["scalars"]) == set(tracking.tracked(dict.fromkeys(entries)))


@pytest.mark.slow
def test_resumed_run_is_one_with_what_was_cut_off(
    options: list[str], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [*options, "--report_to=wandb", f"--output_dir={tmp_path / 'run'}"]
    own = VocAgnoTrainer.training_step

    def stopped(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return own(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(VocAgnoTrainer, "training_step", stopped)
        assert parser.main(argv) == Exit.STOPPED
    time.sleep(1.1)  # directories of offline runs are named by the second
    assert parser.main(argv) == 0
    ids = {path.name.rpartition("-")[2] for path in offline.glob("offline-run-*")}
    assert len(ids) == 1
    assert len([*offline.glob("offline-run-*")]) == 2


@pytest.mark.parametrize(
    ("recipe", "given", "environment", "expected"),
    [
        ("", [], {}, {"project": "vocagnolm", "group": None, "name": "out"}),
        ("recipes/a/b/c.yaml", [], {}, {"group": "a/b", "name": "a/b/c"}),
        ("mine/recipes.yaml", [], {}, {"group": "mine", "name": "mine/recipes"}),
        ("mine/a.yaml", [], {}, {"group": "mine", "name": "mine/a"}),
        ("mine/a.yaml", ["--run_name=n"], {"WANDB_NAME": "m"}, {"group": "mine", "name": "n"}),
        ("", ["--project=e/p"], {"WANDB_PROJECT": "q"}, {"entity": "e", "project": "p"}),
        ("", [], {"WANDB_PROJECT": "q"}, {"entity": None, "project": "q"}),
        ("", [], {"WANDB_TAGS": "x,z" + "y" * 64}, {"tags": ["x", "y" * 64]}),
        ("mine/a.yaml", [], {"WANDB_RUN_GROUP": "g", "WANDB_NAME": "n"}, {"group": "g"}),
    ],
)
def test_place_follows_options_environment_and_recipe(
    options: list[str],
    offline: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    given: list[str],
    environment: dict[str, str],
    expected: dict[str, object],
) -> None:
    if recipe:
        path = tmp_path / recipe
        path.parent.mkdir(parents=True)
        path.write_text("seed: 1\n")
        given = [*given, f"--config={path}"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    job = parse([*options, *given, f"--output_dir={tmp_path / 'out'}"])
    assert tracked_run.wandb_arguments(job, settings_of(job)).items() >= expected.items()


def test_run_that_cannot_be_online_begins_offline(
    offline: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After hours of alignment, a missing key must not cost the training."""
    with tracking.begin_run({"project": "p"}) as run:
        assert run.offline
    assert re.search(
        r"wandb      offline \(.*key.*\); `wandb sync .*` sends it", capfd.readouterr().err
    )
