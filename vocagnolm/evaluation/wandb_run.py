"""Evaluations in Weights & Biases. They are added to the run that trained the model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from vocagnolm.shell.io import JsonObject
from vocagnolm.training.options import RunOptions
from vocagnolm.training.tracking import EVALUATION, begin_run, read_place


def log_evaluation(results: JsonObject, directory: Path) -> None:
    """Add the accuracies to the summary of a run, and the item files to its files.

    A checkpoint's evaluation goes to the run that wrote it, as `eval/checkpoint-500/gsm8k/...`.
    """
    name = results["model"]["name"]
    model = Path(name).resolve()
    # These parts tell the evaluations of one run apart: of its checkpoints, in a chat, and with
    # sampled outputs.
    parts = []
    # The directory of a run's model says which run wrote it. Checkpoints are in that directory.
    place = read_place(model)
    if not place and model.is_dir():
        place = read_place(model.parent)
        if place:
            parts.append(model.name)
    if results["settings"].get("protocol"):
        parts.append("chat")
    if results["settings"].get("sampling"):
        parts.append("sampled")
    part = "-".join(parts)
    # A model that no run wrote gets its own run.
    if not place:
        project = os.environ.get("WANDB_PROJECT", RunOptions.project)
        place = {"project": project, "name": f"evaluation of {name}"}
    # Add this entry to the run's configuration, whose other entries stay.
    entry = f"{EVALUATION}_{part}" if part else EVALUATION
    about_evaluation = {key: results[key] for key in ("model", "settings", "environment")}
    config = place.get("config", {}) | {entry: about_evaluation}
    samples = (results["settings"].get("sampling") or {}).get("samples", 1)
    metric = f"avg_at_{samples}_percent" if samples > 1 else "accuracy_percent"
    with begin_run(place | {"config": config}) as run:
        for column, values in (results["benchmarks"] | results["averages"]).items():
            # A slash in "w/o" would separate parts of the name.
            names = ["eval", part, column.replace("w/o", "without"), *values["marked"]]
            prefix = "/".join(filter(None, names))
            # Averages of benchmarks with several outputs per item have the same k.
            run.summary[f"{prefix}/{metric}"] = values["rounded"]
            for k, passes in values.get("pass_at", {}).items():
                run.summary[f"{prefix}/pass_at_{k}_percent"] = passes["rounded"]
            if "n" in values:
                run.summary[f"{prefix}/items"] = values["n"]
        # wandb saves files under their paths in the run's directory, so copy them there first.
        copies = Path(run.dir, EVALUATION, part)
        copies.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.json*"):
            shutil.copy(path, copies)
        run.save(f"{copies}/*", base_path=run.dir, policy="end")
