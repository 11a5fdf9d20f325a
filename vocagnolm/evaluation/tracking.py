"""An evaluation in Weights & Biases, in the run that trained the model: docs/wandb.md."""

import os
import shutil
from pathlib import Path

from vocagnolm.io import JsonObject
from vocagnolm.run.wandb import begin_run, read_place


def log_evaluation(results: JsonObject, directory: Path) -> None:
    """Put the accuracies into the summary of a run, and the item files among its files.

    A checkpoint's are in the run that wrote it, as `eval/checkpoint-500/gsm8k/...`.
    """
    name = results["model"]["name"]
    model, parts = Path(name).resolve(), []
    place = read_place(model)
    if not place and model.is_dir() and (place := read_place(model.parent)):
        parts.append(model.name)
    if results["settings"].get("protocol"):
        parts.append("chat")
    part = "-".join(parts)
    project = os.environ.get("WANDB_PROJECT", "vocagnolm")
    place = place or {"project": project, "name": f"evaluation of {name}"}
    about = {key: results[key] for key in ("model", "settings", "environment")}
    config = {**place.get("config", {}), "_".join(filter(None, ("evaluation", part))): about}
    with begin_run({**place, "config": config}) as run:
        for column, values in {**results["benchmarks"], **results["averages"]}.items():
            # A slash would begin a part of the name.
            names = ("eval", part, column.replace("w/o", "without"), *values["marked"])
            prefix = "/".join(filter(None, names))
            run.summary[f"{prefix}/accuracy_percent"] = values["rounded"]
            if "n" in values:
                run.summary[f"{prefix}/items"] = values["n"]
        copies = Path(run.dir, "evaluation", part)
        copies.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.json*"):
            shutil.copy(path, copies)
        run.save(f"{copies}/*", base_path=run.dir, policy="end")
