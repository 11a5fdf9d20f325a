"""Columns in Weights & Biases: in the training run or one of its own, with whatever models say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wandb_files import stored

from vocagnolm.evaluation.records import read_records
from vocagnolm.evaluation.tracking import Tracker, summary

HOSTILE = ["lone \ud83d surrogate", "NUL \x00 and \x1b", "数学 😀", "", "x" * 10_000]
RESULTS: dict[str, Any] = {
    "model": {"name": "runs/student", "revision": "sha256:aa"},
    "grader": "the harness",
    "benchmarks": {
        "gsm8k": {
            "rounded": 36.2,
            "interval": [33.0, 39.0],
            "n": 5,
            "unanswered": 0.2,
            "math_verify": {"rounded": 35.1},
            "marked": ["partial"],
        }
    },
    "averages": {
        "AVG": {"rounded": 30.1, "marked": []},
        "AVG w/o SAT": {"rounded": 30.2, "marked": []},
    },
    "marks": ["partial: 5 of 1319 items"],
}
RECORDS = [
    {
        "idx": idx,
        "raw_output": text,
        "prediction": text or None,
        "gold": "3",
        "correct": idx == 2,
        "decided_by": "string",
        "finish_reason": "stop",
        "math_verify": None if idx % 2 else False,
    }
    for idx, text in enumerate(HOSTILE)
]


PLACE = {
    "id": "abc123",
    "project": "students",
    "entity": None,
    "group": "table1",
    "name": "table1/a",
    "tags": ["cpt"],
    "config": {"method": "cpt", "models": {"student": {"parameters": 3}}},
}


@pytest.mark.processes
@pytest.mark.parametrize("part", ["", "checkpoint-20", "chat", "checkpoint-20-chat"])
def test_evaluation_is_in_the_training_run(offline: Path, tmp_path: Path, part: str) -> None:
    model = tmp_path / "run" / part.removesuffix("chat").removesuffix("-")
    model.mkdir(parents=True)
    (tmp_path / "run" / "wandb_run.json").write_text(json.dumps(PLACE))
    tracker = Tracker(str(model), chat=part.endswith("chat"))
    tracker.report(RESULTS, {"gsm8k": RECORDS})
    (run,) = offline.glob("offline-run-*-abc123")
    found = stored(run)
    start = found["run"]
    assert (start["project"], start["run_group"], start["tags"]) == ("students", "table1", ["cpt"])
    assert start["display_name"] == "table1/a"
    config = found["config"]
    assert config.items() >= PLACE["config"].items()  # type: ignore[attr-defined]
    assert config[f"evaluation_{part}".strip("_")]["model"] == RESULTS["model"]
    expected = dict(summary(RESULTS, part))
    assert found["summary"].items() >= expected.items()
    assert f"eval/{part}/gsm8k/partial/items".replace("//", "/") in expected
    (table,) = run.glob("files/media/table/eval/**/*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"][:2] == ["idx", "raw_output"]
    shown = [row[1] for row in content["data"]]
    assert shown == [r"lone \ud83d surrogate", *(HOSTILE[idx] for idx in (1, 3, 4))]
    files = run / "files" / "evaluation" / part
    assert json.loads((files / "results.json").read_text()) == RESULTS
    verdicts = read_records(files / "gsm8k.jsonl")
    assert {idx: one["correct"] for idx, one in verdicts.items()} == {i: i == 2 for i in range(5)}
    assert "raw_output" not in verdicts[0]


@pytest.mark.processes
@pytest.mark.parametrize("model", ["org/model", "."], ids=["of the hub", "a directory"])
def test_evaluation_has_a_run_of_its_own(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.chdir(tmp_path)
    Tracker(model).report(RESULTS, {"gsm8k": RECORDS})
    (run,) = offline.glob("offline-run-*")
    found = stored(run)
    start = found["run"]
    assert (start["project"], start["display_name"]) == ("mine", "evaluation of runs/student")
    assert found["config"]["evaluation"]["model"] == RESULTS["model"]


def test_summary_says_what_is_marked_when_it_is() -> None:
    assert dict(summary(RESULTS)) == {
        "eval/gsm8k/partial/accuracy_percent": 36.2,
        "eval/gsm8k/partial/interval_low_percent": 33.0,
        "eval/gsm8k/partial/interval_high_percent": 39.0,
        "eval/gsm8k/partial/items": 5,
        "eval/gsm8k/partial/unanswered_fraction": 0.2,
        "eval/gsm8k/partial/math_verify_accuracy_percent": 35.1,
        "eval/AVG/accuracy_percent": 30.1,
        "eval/AVG without SAT/accuracy_percent": 30.2,
        "eval/marks": "partial: 5 of 1319 items",
        "eval/grader": "the harness",
    }
