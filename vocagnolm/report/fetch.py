"""Fetches runs from Weights & Biases for a comparison."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from vocagnolm.fields import OptionError
from vocagnolm.shell.io import RUN_FILE, JsonObject, write_json
from vocagnolm.training.tracking import EVALUATION, log_name

STEP = "train/global_step"
# No run logs this many rows. With a smaller number, the server would sample them.
_ROWS = 1_000_000


def fetch(projects: Sequence[str], directory: Path) -> list[Path]:
    """Write the runs of some projects like the commands do, and return each run's directory.

    Raises:
        ValueError: there is no key, or there are no runs of vocagnolm train.
    """
    runs = []
    # The server lists the oldest run first, which is the baseline.
    for run in _list_runs(projects):
        files = list(run.files(pattern=f"{EVALUATION}/%"))
        # A project may have runs of other programs. They have neither our settings nor our
        # evaluations.
        if "settings" in run.config or files:
            runs.append((run, files))
    if not runs:
        raise OptionError("wandb", f"{' '.join(projects)}: no runs of vocagnolm train are there")
    names = [_directory_name(run) for run, _ in runs]
    directories = []
    for (run, files), name in zip(runs, names, strict=True):
        # Several runs may have the same name. Their ids distinguish their directories.
        home = directory / (name if names.count(name) == 1 else f"{name}-{run.id}")
        if "settings" in run.config:
            _write_run(run, home)
            directories.append(home)
        for file in files:
            # evaluation/results.json belongs to the run's model,
            # evaluation/checkpoint-500/results.json to a checkpoint, which gets a directory next to
            # the run's.
            path = PurePosixPath(file.name)
            checkpoint = path.parts[1:-1]
            model = home.with_name("-".join((home.name,) + checkpoint))
            _download(file, model / EVALUATION / path.name)
            if path.name == "results.json" and model not in directories:
                directories.append(model)
    return directories


def _list_runs(projects: Sequence[str]) -> list[Any]:
    """List the runs of some projects. A server's error becomes one line."""
    import wandb

    try:
        if not wandb.login(prompt=False):
            raise ValueError("found no API key: run `wandb login`")
        api = wandb.Api(timeout=60)
        runs: list[Any] = []
        for project in projects:
            runs += api.runs(project, order="+created_at", lazy=False)
    except (wandb.errors.Error, ValueError) as error:
        raise OptionError("wandb", f"{' '.join(projects)}: {error}") from error
    return runs


def _directory_name(run: Any) -> str:
    """Return the last part of a run's name, which cannot leave a directory, or else its id."""
    return PurePosixPath(run.name or run.id).name.strip(".") or run.id


def _download(file: Any, target: Path) -> None:
    """Download one file of a run."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # The library recreates the folders in a file's name, which are not wanted here.
    with TemporaryDirectory() as scratch:
        file.download(root=scratch).close()
        shutil.move(Path(scratch, file.name), target)


def _write_run(run: Any, directory: Path) -> None:
    """Write a run's settings and log."""
    log: list[JsonObject] = []
    for row in run.history(samples=_ROWS, pandas=False):
        entry = {}
        for name, value in row.items():
            # Tables and pictures are not numbers, and names with an underscore are the server's.
            is_number = isinstance(value, int | float)
            if is_number and not name.startswith("_") and name != STEP:
                entry[log_name(name)] = value
        if entry and STEP in row:
            step = row[STEP]
            # A resumed run goes back to its checkpoint, and logs the later steps again. A step
            # begins with its training entry, and an evaluation of the same step follows.
            first_replaced = step if "student_loss_nats" in entry else step + 1
            while log and log[-1]["step"] >= first_replaced:
                log.pop()
            entry["step"] = step
            log.append(entry)
    # The trainer's own state is not among a run's files. `vocagnolm compare` needs these fields of
    # it.
    last = max((entry["step"] for entry in log), default=0)
    flos = max((entry.get("total_flos", 0) for entry in log), default=0)
    state = {"max_steps": last, "global_step": last, "total_flos": flos, "log_history": log}
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / RUN_FILE, run.config["settings"])
    write_json(directory / TRAINER_STATE_NAME, state)
