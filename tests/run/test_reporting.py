"""One set of names in every tracker, read back from the files that the real packages write."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback
from wandb_files import stored, wandb_records
from world import make_trainer

from vocagnolm.host.trackers import (
    GUIDANCE_TABLE,
    STEP,
    TRACKED_NAMES,
    TRACKER_FILE,
    Tracking,
    tracked_name,
)
from vocagnolm.packing import Blocks
from vocagnolm.run.reporting import Reporter
from vocagnolm.trainer import VocAgnoTrainer

SECTIONS = ("train/", "guidance/", "teacher/", "speed/", "memory/", "eval/")


def train(out: Path, blocks: Blocks, pair: Any, *trackers: str, **options: Any) -> VocAgnoTrainer:
    """A run of three steps with a table, evaluated twice: while it trains and behind it."""
    more = {"eval_strategy": "steps", "eval_steps": 3, "report_to": list(trackers), **options}
    trainer = make_trainer(out, blocks, *pair, options={"eval_dataset": blocks}, **more)
    config = {"method": "vocagnolm", "top_k": 0.4, "models": {"student": {"parameters": 3}}}
    trainer.tracking = Tracking("lab", "table1", "table1/a", ["vocagnolm"], config)
    trainer.add_callback(Shown(trainer))
    trainer.train()
    trainer.evaluate()
    trainer.finish_reports()
    return trainer


class Shown(TrainerCallback):
    """Shows a table at the last step."""

    def __init__(self, trainer: VocAgnoTrainer):
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            rows = [["a", 1.5], ["b|", None]]
            self.trainer.report_table(GUIDANCE_TABLE, ["token", "loss"], rows, 3)


def logged(trainer: VocAgnoTrainer) -> set[str]:
    """The names of all entries of a run's log."""
    return {tracked_name(key) for entry in trainer.state.log_history for key in entry} - {
        tracked_name("step")
    }


@pytest.mark.processes
def test_wandb_holds_all_that_was_logged(
    offline: Path, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = train(tmp_path / "out", blocks, pair, "wandb")
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    about = found["run"]
    assert (about["project"], about["run_group"]) == ("lab", "table1")
    assert (about["display_name"], about["tags"]) == ("table1/a", ["vocagnolm"])
    config = found["config"]
    assert config["models"] == {"student": {"parameters": 3}}
    assert (config["method"], config["top_k"], config["steps"]) == ("vocagnolm", 0.4, 3)
    assert config["trainer"]["lr_scheduler_type"] == "linear"
    assert config["student_config"]["model_type"] == "llama"
    rows = [row for row in found["history"] if "train/student_loss_nats" in row]
    mine = [entry for entry in trainer.state.log_history if "student_loss_nats" in entry]
    for row, entry in zip(rows, mine, strict=True):
        values = {tracked_name(key): x for key, x in entry.items() if key != "step"}
        assert row.items() >= values.items()
        assert row[STEP] == entry["step"]
        counts, edges = (row[f"guidance/excess_loss_nats.{key}"] for key in ("values", "bins"))
        assert len(counts) == len(edges) - 1
        assert sum(counts) > 100
    (file,) = run.glob("*.wandb")
    axes = [one["metric"] for one in wandb_records(file) if one["type"] == "metric"]
    assert STEP in json.dumps([axis for axis in axes if "*" in axis.values()])
    tracked = {name for row in found["history"] for name in row}
    assert logged(trainer) <= tracked
    assert {"guidance/tokens._type", "eval/loss", "train/mean_loss"} <= tracked
    assert all(name.startswith((*SECTIONS, "_")) for name in tracked)
    assert found["summary"]["eval/loss"] == mine_last(trainer, "eval_loss")
    (table,) = run.glob("files/media/table/guidance/*.json")
    assert json.loads(table.read_text())["data"] == [["a", 1.5], ["b|", None]]


def mine_last(trainer: VocAgnoTrainer, key: str) -> float:
    return float([entry[key] for entry in trainer.state.log_history if key in entry][-1])


def test_tensorboard_has_the_same_names(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = train(tmp_path / "out", blocks, pair, "tensorboard")
    keep_all = {"histograms": 0, "scalars": 0}
    events = EventAccumulator(str(tmp_path / "events"), size_guidance=keep_all)
    events.Reload()
    tags = events.Tags()
    assert set(tags["scalars"]) == logged(trainer)
    assert tags["histograms"] == ["guidance/excess_loss_nats"]
    assert {"config/text_summary", "guidance/tokens/text_summary"} <= set(tags["tensors"])
    last = events.Scalars("train/student_loss_nats")[-1]
    assert (last.step, last.value) == (3, pytest.approx(mine_last(trainer, "student_loss_nats")))
    histograms = events.Histograms("guidance/excess_loss_nats")
    assert [event.step for event in histograms] == [1, 2, 3]
    shown = histograms[-1].histogram_value
    assert shown.num == sum(shown.bucket) > 10


class FakeTrackio(ModuleType):
    """As much of trackio as transformers and we use, which remembers what it is told."""

    __version__ = "0.43.0"

    def __init__(self) -> None:
        super().__init__("trackio")
        self.logged: list[dict[str, Any]] = []
        self.given: dict[str, Any] = {}
        self.config: Any = type("Config", (dict,), {"update": self._update})()
        space = type("Variable", (), {"get": staticmethod(lambda: None)})
        self.context_vars = type("Variables", (), {"current_space_id": space})

    def _update(self, values: dict[str, Any], allow_val_change: bool) -> None:
        self.given |= values

    def init(self, **given: Any) -> None:
        self.given |= given

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        pass

    @staticmethod
    def Histogram(np_histogram: Any) -> Any:  # noqa: N802
        return np_histogram

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> Any:  # noqa: N802
        return columns, data


def test_trackio_has_the_same_names(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    integrations = "transformers.integrations.integration_utils"
    monkeypatch.setattr(f"{integrations}.is_trackio_available", lambda: True)
    trainer = train(tmp_path / "out", blocks, pair, "trackio", trackio_static_space_id=False)
    tracked = {name for row in fake.logged for name in row}
    assert tracked == logged(trainer) | {STEP, "guidance/excess_loss_nats", "guidance/tokens"}
    assert (fake.given["project"], fake.given["name"]) == ("lab", "table1/a")
    assert (fake.given["method"], fake.given["steps"]) == ("vocagnolm", 3)


@pytest.mark.processes
def test_resumed_run_is_one_with_what_was_cut_off(
    offline: Path, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    ids = []
    for steps, resumed in ((2, False), (3, True), (1, False)):
        trainer = make_trainer(
            tmp_path / "out", blocks, *pair, max_steps=steps, report_to=["wandb"], **options
        )
        trainer.train(resume_from_checkpoint=resumed)
        trainer.finish_reports()
        ids.append(json.loads((tmp_path / "out" / TRACKER_FILE).read_text())["id"])
        if len(ids) == 1:
            time.sleep(1.1)  # directories of offline runs are named by the second
    assert ids[0] == ids[1] != ids[2]
    runs = sorted(offline.glob(f"offline-run-*-{ids[0]}"))
    assert [stored(run)["config"]["steps"] for run in runs] == [2, 3]


@pytest.mark.processes
def test_name_that_wandb_refuses_is_one_line(
    offline: Path, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    said = r"^--report_to wandb: Invalid project name 'a#b'.*: change --project or --run_name"
    trainer = make_trainer(tmp_path, blocks, *pair, report_to=["wandb"], project="a#b")
    with pytest.raises(ValueError, match=said):
        trainer.train()


def test_other_processes_send_nothing() -> None:
    reporter: Any = Reporter(Tracking, lambda: None)
    reporter.on_log(None, SimpleNamespace(is_world_process_zero=False), None, {"loss": 1.0})


@pytest.mark.processes
def test_run_of_the_user_is_taken_as_it_is(
    offline: Path, blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    import wandb

    with wandb.init(project="own", mode="offline") as own:
        trainer = make_trainer(tmp_path / "out", blocks, *pair, report_to=["wandb"])
        trainer.tracking = Tracking("lab", config={"method": "cpt"})
        trainer.train()
        assert wandb.run is own
        assert own.config["method"] == "cpt"
        assert own.project == "own"


def test_every_entry_of_a_log_has_a_name(
    blocks: Blocks, pair: tuple[Any, Any], tmp_path: Path
) -> None:
    trainer = train(tmp_path / "out", blocks, pair)
    entries = {key for entry in trainer.state.log_history for key in entry} - {"step"}
    assert entries <= TRACKED_NAMES.keys()


def test_names_are_documented(request: pytest.FixtureRequest) -> None:
    page = (Path(str(request.config.rootpath)) / "docs" / "wandb.md").read_text(encoding="utf-8")
    for name in TRACKED_NAMES.values():
        assert f"`{name}`" in page, name
