"""Columns in Weights & Biases: in the training run or one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from wandb_files import PLACE, stored

from vocagnolm.evaluation.records import read_records, to_line
from vocagnolm.evaluation.results import log_to_wandb

RECORDS = [
    {"idx": idx, "raw_output": text, "correct": idx == 2}
    for idx, text in enumerate(["lone \ud83d surrogate", "NUL \x00 and \x1b", "数学 😀", ""])
]


def write_evaluation(model: str, directory: Path, protocol: object = None) -> dict[str, Any]:
    results = {
        "model": {"name": model, "revision": "sha256:aa"},
        "benchmarks": {"gsm8k": {"rounded": 36.2, "n": 5, "marked": ["partial"]}},
        "averages": {"AVG w/o SAT": {"rounded": 30.2, "marked": []}},
        "settings": {"protocol": protocol},
        "environment": {},
    }
    directory.mkdir(parents=True)
    (directory / "results.json").write_text(json.dumps(results))
    (directory / "gsm8k.jsonl").write_text("".join(map(to_line, RECORDS)))
    return results


@pytest.mark.processes
@pytest.mark.parametrize("part", ["", "checkpoint-20-chat"])
def test_evaluation_is_in_the_training_run(offline: Path, tmp_path: Path, part: str) -> None:
    model = tmp_path / "run" / part.removesuffix("chat").removesuffix("-")
    model.mkdir(parents=True)
    (tmp_path / "run" / "wandb_run.json").write_text(json.dumps(PLACE))
    protocol = {"name": "zero-shot chat"} if part.endswith("chat") else None
    results = write_evaluation(str(model), model / "evaluation", protocol)
    log_to_wandb(results, model / "evaluation")
    (run,) = offline.glob("offline-run-*-abc123")
    found: dict[str, Any] = stored(run)
    start = found["run"]
    assert (start["project"], start["run_group"], start["tags"]) == ("students", "table1", ["cpt"])
    assert start["display_name"] == "table1/a"
    assert found["config"].items() >= PLACE["config"].items()
    assert found["config"][f"evaluation_{part}".rstrip("_")]["model"] == results["model"]
    prefix = f"eval/{part}".rstrip("/")
    expected = {
        f"{prefix}/gsm8k/partial/accuracy_percent": 36.2,
        f"{prefix}/gsm8k/partial/items": 5,
        f"{prefix}/AVG without SAT/accuracy_percent": 30.2,
    }
    assert found["summary"].items() >= expected.items()
    files = run / "files" / "evaluation" / part
    assert json.loads((files / "results.json").read_text()) == results
    assert list(read_records(files / "gsm8k.jsonl").values()) == RECORDS


@pytest.mark.processes
def test_evaluation_of_drawn_outputs_has_a_run_and_names_of_its_own(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.chdir(tmp_path)
    results = write_evaluation(".", tmp_path / "evaluation")
    results["settings"]["sampling"] = {"samples": 4, "temperature": 0.6, "top_p": 1.0}
    passes = {"2": {"rounded": 50.0}, "4": {"rounded": 66.7}}
    results["benchmarks"] = {"aime24": {"rounded": 41.7, "n": 3, "marked": ["sampled"]}}
    results["benchmarks"]["aime24"]["pass_at"] = passes
    log_to_wandb(results, tmp_path / "evaluation")
    (run,) = offline.glob("offline-run-*")
    found: dict[str, Any] = stored(run)
    start = found["run"]
    assert (start["project"], start["display_name"]) == ("mine", "evaluation of .")
    prefix = "eval/sampled/aime24/sampled"
    expected = {
        f"{prefix}/avg_at_4_percent": 41.7,
        f"{prefix}/pass_at_2_percent": 50.0,
        f"{prefix}/pass_at_4_percent": 66.7,
        f"{prefix}/items": 3,
    }
    assert found["summary"].items() >= expected.items()
    assert found["config"]["evaluation_sampled"]["settings"] == results["settings"]
