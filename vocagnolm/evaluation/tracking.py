"""Evaluations in Weights & Biases: they join the run that trained the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vocagnolm.io import JsonObject
from vocagnolm.training.options import RunOptions
from vocagnolm.training.tracking import EVALUATION, begin_run, read_place


def log_evaluation(results: JsonObject, directory: Path) -> None:
    """Put the accuracies into the summary of a run, and the item files among its files.

    A checkpoint's are in the run that wrote it, as `eval/checkpoint-500/gsm8k/...`.
    """
    name = results["model"]["name"]
    model, parts = Path(name).resolve(), []
    known = read_place(model)
    if not known and model.is_dir() and (known := read_place(model.parent)):
        parts.append(model.name)
    if results["settings"].get("protocol"):
        parts.append("chat")
    part = "-".join(parts)
    if not known:
        project = os.environ.get("WANDB_PROJECT", RunOptions.project)
        known = {"project": project, "name": f"evaluation of {name}"}
    entry = "_".join(filter(None, (EVALUATION, part)))
    own = {entry: {key: results[key] for key in ("model", "settings", "environment")}}
    with begin_run({**known, "config": known.get("config", {}) | own}) as run:
        for column, values in {**results["benchmarks"], **results["averages"]}.items():
            # A slash would begin a part of the name.
            names = ("eval", part, column.replace("w/o", "without"), *values["marked"])
            prefix = "/".join(filter(None, names))
            run.summary[f"{prefix}/accuracy_percent"] = values["rounded"]
            if "n" in values:
                run.summary[f"{prefix}/items"] = values["n"]
        copies = Path(run.dir, EVALUATION, part)
        copies.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.json*"):
            shutil.copy(path, copies)
        run.save(f"{copies}/*", base_path=run.dir, policy="end")
