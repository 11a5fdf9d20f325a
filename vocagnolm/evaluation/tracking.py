"""The columns of an evaluation in Weights & Biases, beside the run that trained the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.records import Record

TRACKER_FILE = "wandb_run.json"  # written by train.py into the model's directory
_SHOWN = ("idx", "raw_output", "prediction", "gold", "decided_by", "finish_reason", "math_verify")


def report_to_wandb(
    results: Mapping[str, Any], wrong: Mapping[str, list[Record]], model: str
) -> None:
    """Put the columns into the summary of the model's training run, or of a run of its own.

    Without a key, or with WANDB_MODE=offline, the run is written to disk for `wandb sync`.

    Args:
        results: of `report.build_results`.
        wrong: the records of wrong answers, by benchmark.
        model: as given to `--model`.
    """
    import wandb

    file = Path(model) / TRACKER_FILE
    training = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    with wandb.init(
        project=training.get("project") or os.environ.get("WANDB_PROJECT", "vocagnolm"),
        entity=training.get("entity"),
        id=training.get("id"),
        resume="allow" if training else None,
        name=None if training else f"evaluation of {results['model']['name']}",
        mode="offline" if _is_offline() else None,
    ) as run:
        run.summary.update(dict(summary(results)))
        for name, records in wrong.items():
            rows = [[record[field] for field in _SHOWN] for record in records]
            table = wandb.Table(columns=list(_SHOWN), data=rows)
            run.log({f"evaluation/{name}/wrong_answers": table})


def summary(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values of the summary; what is marked says so in its name."""
    for name, column in results["benchmarks"].items():
        place = f"evaluation/{name}" + ("/partial" if column["partial"] else "")
        yield f"{place}/accuracy", column["rounded"]
        yield f"{place}/interval_low", column["interval"][0]
        yield f"{place}/interval_high", column["interval"][1]
        yield f"{place}/n", column["n"]
        yield f"{place}/unanswered", column["unanswered"]
        if column["math_verify"]:
            yield f"{place}/math_verify_accuracy", column["math_verify"]["rounded"]
    for name, value in results["averages"].items():
        place = f"evaluation/{name}" + ("/partial" if value["partial"] else "")
        yield place, value["rounded"]
    yield "evaluation/marks", "; ".join(results["marks"])
    yield "evaluation/grader", results["grader"]


def _is_offline() -> bool:
    import wandb

    return "WANDB_MODE" not in os.environ and not wandb.api.api_key
