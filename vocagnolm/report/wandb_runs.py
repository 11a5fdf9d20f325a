"""Runs of Weights & Biases, laid out as train.py and evaluate_math.py leave them on the disk."""

import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from vocagnolm.io import RUN_FILE, JsonObject, write_json
from vocagnolm.report.runs import EVALUATION_FOLDER, RESULTS_FILE, STATE_FILE, reject

# More than a run ever logs: the server is to leave none out.
_ROWS = 1_000_000


def fetch(projects: Sequence[str], directory: Path) -> list[Path]:
    """Lay out the runs of some projects below a directory, and return the place of each."""
    try:
        import wandb

        if not wandb.login(prompt=False):
            reject("a key to read --wandb with", "none", "`wandb login` asks for it")
        api = wandb.Api(timeout=60)
        found: list[Any] = [run for project in projects for run in api.runs(project, lazy=False)]
    except (wandb.errors.Error, ValueError) as error:
        raise ValueError(f"--wandb {' '.join(projects)}: {error}") from error
    files = {run.id: list(run.files(pattern=f"{EVALUATION_FOLDER}/%")) for run in found}
    ours = [run for run in found if "settings" in run.config or files[run.id]]
    if not ours:
        reject(f"runs of train.py in {', '.join(projects)}", "none", "look at --wandb")
    ours.sort(key=lambda run: run.created_at or "")
    # A run is called by the last part of its name, which may not lead out of the directory.
    names = [PurePosixPath(run.name or run.id).name.strip(".") or run.id for run in ours]
    places = []
    for run, name in zip(ours, names, strict=True):
        place = directory / (name if names.count(name) == 1 else f"{name}-{run.id}")
        places += _lay_out(run, files[run.id], place)
    return places


def _lay_out(run: Any, files: Sequence[Any], place: Path) -> list[Path]:
    """Write a run's settings, log and evaluations; a checkpoint's are beside it."""
    places = []
    if "settings" in run.config:
        place.mkdir(parents=True, exist_ok=True)
        write_json(place / RUN_FILE, run.config["settings"])
        log = _log(run.history(samples=_ROWS, pandas=False))
        last = max((entry["step"] for entry in log), default=0)
        state = {"max_steps": last, "global_step": last}
        state["total_flos"] = max((entry.get("total_flos", 0) for entry in log), default=0)
        write_json(place / STATE_FILE, {**state, "log_history": log})
        places.append(place)
    for file in files:
        # As evaluation/results.json or evaluation/checkpoint-500/results.json.
        _, *part, name = PurePosixPath(file.name).parts
        of_model = place.with_name("-".join([place.name, *part]))
        (of_model / EVALUATION_FOLDER).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as scratch:
            file.download(root=scratch).close()
            shutil.move(Path(scratch, file.name), of_model / EVALUATION_FOLDER / name)
        if name == RESULTS_FILE and of_model not in places:
            places.append(of_model)
    return places


def _log(history: Sequence[JsonObject]) -> list[JsonObject]:
    """Turn rows into entries of a log; what is no number, as tables, has no entry."""
    # It imports transformers, which a comparison of directories does not need.
    from vocagnolm.run.wandb import STEP, log_name

    log: list[JsonObject] = []
    for row in history:
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
    return log
