"""Runs from files and a server of Weights & Biases, compared as those in directories are."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_results import record, write_evaluation
from wandb_server import serving

from vocagnolm import cli
from vocagnolm.evaluation.tracking import Tracker
from vocagnolm.host.manifest import unsealed
from vocagnolm.host.trackers import STEP, Tracking, log_name, tracked_name, write_place
from vocagnolm.report import wandb_runs
from vocagnolm.report.compare import compare
from vocagnolm.report.report import comparison_markdown
from vocagnolm.report.wandb_runs import fetch

RIGHT = {"cpt": [True, False, False, False], "vocagnolm": [True, True, True, False]}
SETTINGS = {"student": "s", "dataset": "d", "global_batch_tokens": 512, "seed": 1, "lr": 1.0}
LOG = [
    {"loss": 2.5, "student_loss_nats": 2.75, "tokens_per_s": 100.0, "step": 1},
    {"eval_loss": 3.25, "step": 2},
    {"train_runtime": 7200.0, "total_flos": 1e15, "train_loss": 2.5, "step": 2},
]


def make_run(root: Path, method: str) -> Path:
    """A run as train.py and evaluate_math.py leave it, in a directory and in wandb's files."""
    import wandb

    run = root / method
    right: Sequence[bool] = RIGHT[method]
    write_evaluation(run / "evaluation", {"demo": right})
    settings = SETTINGS | {"method": method, "teacher": "T" if method == "vocagnolm" else None}
    (run / "run.json").write_text(json.dumps(settings))
    state = {"max_steps": 2, "global_step": 2, "total_flos": 1e15, "log_history": LOG}
    (run / "trainer_state.json").write_text(json.dumps(state))
    about = {"models": {"student": {"parameters": 3}}, "steps": 2}
    place = Tracking("students", "show", f"show/{method}", [method], settings | about).place()
    with wandb.init(**place, mode="offline") as started:
        for entry in LOG:
            values = {tracked_name(name): x for name, x in entry.items() if name != "step"}
            histogram = wandb.Histogram(np_histogram=([1, 2], [0, 1, 2]))
            started.log({**values, STEP: entry["step"], "guidance/excess_loss_nats": histogram})
        write_place(run, wandb, place)
    results = unsealed(json.loads((run / "evaluation" / "results.json").read_text()))
    shown = dict.fromkeys(("raw_output", "prediction", "decided_by", "finish_reason"), "")
    items = [record(n, x) | shown | {"math_verify": None} for n, x in enumerate(right)]
    Tracker(str(run)).report(results, {"demo": items})
    return run


@pytest.fixture
def runs(offline: Path, tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "runs", method) for method in RIGHT]


def told(paths: Sequence[Path], place: str) -> str:
    """A comparison in Markdown, with the names of the runs only."""
    return comparison_markdown(compare(paths)).replace(place, "")


@pytest.mark.processes
def test_files_are_compared_as_directories(
    runs: list[Path], offline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(list(offline.glob("offline-run-*"))) == 4
    fetched = fetch([str(offline)], tmp_path / "out")
    assert [path.name for path in fetched] == ["cpt", "vocagnolm"]
    expected = told(runs, "")
    assert told(fetched, "") == expected
    assert "3.2500" in expected
    # One of them from its directory, the other from its own files.
    mine = [str(path) for path in sorted(offline.glob(f"*-{run_id(runs[1])}*"))]
    argv = ["compare", str(runs[0]), "--wandb", *mine, "--output_dir", str(tmp_path / "page")]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == expected.strip()
    assert (tmp_path / "page" / "comparison.html").is_file()


def run_id(run: Path) -> str:
    return str(json.loads((run / "wandb_run.json").read_text())["id"])


@pytest.mark.processes
@pytest.mark.slow
def test_server_is_compared_as_directories(
    runs: list[Path], offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    with serving() as server:
        for run in runs:
            server.add(*sorted(offline.glob(f"*-{run_id(run)}*")))
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        wandb.teardown()
        fetched = fetch(["lab/students", str(offline)], tmp_path / "out")
        assert told(fetched, "") == told(runs, "")
        argv = ["compare", *map(str, runs), "--wandb_report", "lab/students"]
        assert cli.main(argv) == 0
        (report,) = server.reports
        assert report["displayName"] == "Comparison of cpt, vocagnolm"
        assert "Accuracy (%)" in report["spec"]
        assert "guidance/excess_loss_p50_nats" in report["spec"]
        server.is_known = False
        wandb.teardown()
        with pytest.raises(ValueError, match="--wandb lab/students: Failed to authenticate"):
            fetch(["lab/students"], tmp_path / "other")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["--wandb", "nothing"],
            "expected --wandb to name ENTITY/PROJECT or an existing directory",
        ),
        pytest.param(
            *(
                ["--wandb", "lab/students"],
                "expected a key to read --wandb lab/students with, found",
            ),
            marks=pytest.mark.processes,
        ),
        (["--wandb_report", "students"], "expected --wandb_report ENTITY/PROJECT"),
        (["--wandb", "BROKEN"], "expected a file of Weights & Biases, found"),
    ],
)
def test_wrong_source_is_one_line(
    argv: list[str],
    expected: str,
    offline: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "run-x.wandb"
    broken.write_bytes(b"nothing of theirs")
    argv = [str(broken) if word == "BROKEN" else word for word in argv]
    assert cli.main(["compare", *argv]) == 2
    complained = capsys.readouterr().err
    assert expected in complained
    assert complained.count("\n") == 1


def test_missing_packages_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert cli.main(["compare", "--wandb_report", "lab/students"]) == 2
    assert "needs the package wandb-workspaces" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert cli.main(["compare", "--wandb", "lab/students"]) == 2
    assert "needs the package wandb, which" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_resumed_run_is_read_without_what_was_repeated(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, evaluation = "train/student_loss_nats", "eval/loss"
    # Its second start had a server, and its third had none.
    starts = {
        "offline-run-20260101_000000-a": [(train, 1), (train, 2), (evaluation, 2), (train, 3)],
        "run-20260101_000001-a": [(train, 2), (evaluation, 2), (train, 3), (train, 4)],
        "offline-run-20260101_000002-a": [(train, 4), (evaluation, 4)],
    }
    for name in starts:
        (offline / name).mkdir(parents=True)
        (offline / name / "run-a.wandb").touch()
    evaluated = offline / name / "files" / "evaluation" / "checkpoint-3" / "results.json"
    evaluated.parent.mkdir(parents=True)
    evaluated.touch()

    def records(path: Path) -> list[dict[str, Any]]:
        rows = [{name: 1.0, STEP: step} for name, step in starts[path.parent.name]]
        begun = {"type": "run", "run": {"config": {"update": {"method": "cpt"}}}}
        return [begun, *({"type": "history", "history": {"item": row}} for row in rows)]

    monkeypatch.setattr(wandb_runs, "wandb_records", records)
    run, checkpoint = fetch([str(offline)], tmp_path / "out")
    assert (run.name, checkpoint.name) == ("a", "a-checkpoint-3")
    assert (checkpoint / "evaluation" / "results.json").is_file()
    log = json.loads((run / "trainer_state.json").read_text())["log_history"]
    expected = [(train, 1), (train, 2), (evaluation, 2), (train, 3), (train, 4), (evaluation, 4)]
    assert log == [{log_name(name): 1.0, "step": step} for name, step in expected]


@pytest.mark.parametrize("name", ["..", "a/..", ".", "/", "a/", "//a/.."])
def test_no_name_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    run = wandb_runs._Found("id", name, config={"method": "cpt"})
    (place,) = wandb_runs._lay_out(run, tmp_path / wandb_runs._names([run])[0])
    assert place == tmp_path / ("a" if "a" in name else "id")
    assert (place / "run.json").is_file()


@pytest.mark.processes
def test_runs_of_others_are_left_out(offline: Path, tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="p", name="theirs", config={"lr": 1}, mode="offline") as run:
        run.log({"loss": 1})
    with pytest.raises(ValueError, match=r"expected runs of train\.py in .*, found none"):
        fetch([str(offline)], tmp_path / "out")
