"""Runs of Weights & Biases, fetched to be compared."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from vocagnolm.io import RUN_FILE, JsonObject, write_json
from vocagnolm.training.tracking import EVALUATION, log_name

STEP = "train/global_step"
# More rows than a run ever logs: the server is to leave none out.
_ROWS = 1_000_000


def fetch(projects: Sequence[str], directory: Path) -> list[Path]:
    """Lay out the runs of some projects as commands leave them, and return the place of each.

    Raises:
        ValueError: there is no key, or there are no runs of vocagnolm train.
    """
    import wandb

    try:
        if not wandb.login(prompt=False):
            raise ValueError("found no key to read with: `wandb login` asks for it")
        api = wandb.Api(timeout=60)
        runs: list[Any] = [run for project in projects for run in api.runs(project, lazy=False)]
    except (wandb.errors.Error, ValueError) as error:
        raise ValueError(f"--wandb {' '.join(projects)}: {error}") from error
    files = {run.id: list(run.files(pattern=f"{EVALUATION}/%")) for run in runs}
    ours = [run for run in runs if "settings" in run.config or files[run.id]]
    if not ours:
        expected = f"runs of vocagnolm train in {', '.join(projects)}"
        raise ValueError(f"expected {expected}, found none: look at --wandb")
    ours.sort(key=lambda run: run.created_at or "")
    # A run is called by the last part of its name, which may not lead out of the directory.
    names = [PurePosixPath(run.name or run.id).name.strip(".") or run.id for run in ours]
    places = []
    for run, name in zip(ours, names, strict=True):
        home = directory / (name if names.count(name) == 1 else f"{name}-{run.id}")
        if "settings" in run.config:
            _write_run(run, home)
            places.append(home)
        for file in files[run.id]:
            # As evaluation/results.json or, beside the run, evaluation/checkpoint-500/results.json.
            _, *part, file_name = PurePosixPath(file.name).parts
            model = home.with_name("-".join([home.name, *part]))
            (model / EVALUATION).mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as scratch:
                file.download(root=scratch).close()
                shutil.move(Path(scratch, file.name), model / EVALUATION / file_name)
            if file_name == "results.json" and model not in places:
                places.append(model)
    return places


def _write_run(run: Any, directory: Path) -> None:
    """Write a run's settings and log."""
    log: list[JsonObject] = []
    for row in run.history(samples=_ROWS, pandas=False):
        # What is no number, as tables, has no entry.
        entry = {
            log_name(name): value
            for name, value in row.items()
            if isinstance(value, int | float) and not name.startswith("_") and name != STEP
        }
        if entry and STEP in row:
            step = row[STEP]
            # A resumed run goes back to its checkpoint, and logs again what came behind it.
            first = step if "student_loss_nats" in entry else step + 1
            while log and log[-1]["step"] >= first:
                log.pop()
            log.append({**entry, "step": step})
    last = max((entry["step"] for entry in log), default=0)
    flos = max((entry.get("total_flos", 0) for entry in log), default=0)
    state = {"max_steps": last, "global_step": last, "total_flos": flos, "log_history": log}
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RUN_FILE, run.config["settings"])
    write_json(directory / TRAINER_STATE_NAME, state)
