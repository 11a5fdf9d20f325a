"""Runs in Weights & Biases, laid out as train.py and evaluate_math.py leave them on the disk.

    lab/students                   a project on the server
    wandb, wandb/offline-run-...   files of runs, synced or not; those of one run belong together

So a comparison reads them as it reads directories, and mixes both.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from vocagnolm.cli import note
from vocagnolm.host.settings import RUN_FILE
from vocagnolm.host.trackers import ABOUT, EVALUATION_FOLDER, STEP, import_wandb, log_name
from vocagnolm.io import JsonObject, write_json
from vocagnolm.report.runs import RESULTS_FILE, reject

# More than a run ever logs: the server is to leave none out.
_ROWS = 1_000_000


@dataclass
class _Found:
    """One run of Weights & Biases."""

    id: str
    name: str = ""
    # When it began, as ISO 8601 writes it.
    begun: str = ""
    config: JsonObject = field(default_factory=dict)
    # A row for each call of `wandb.log`.
    history: list[JsonObject] = field(default_factory=list)
    # Put a file into a directory, by its name among the run's files.
    files: dict[str, Callable[[Path], object]] = field(default_factory=dict)


def fetch(sources: Sequence[str], directory: Path) -> list[Path]:
    """Lay out the runs of all sources below a directory, and return the place of each.

    A directory without files of Weights & Biases is taken as it is. Runs that this package has not
    written are left out, and so is what a run has no number of.

    Raises:
        ValueError: a source does not exist, cannot be read, or has no run of this package.
    """
    files: list[Path] = []
    places: list[Path] = []
    projects = []
    for source in sources:
        path = Path(source)
        if path.exists():
            files += (more := _files(path))
            places += [] if more else [path]
        elif source.count("/") == 1 and source[0] not in "/.":
            projects.append(source)
        else:
            expected = "--wandb to name ENTITY/PROJECT or an existing directory"
            reject(expected, repr(source), "give one of them")
    found = _read_files(files)
    for project in projects:
        # A run that is here too counts once.
        found = {**_ask(project), **found}
    ours = [run for run in found.values() if "method" in run.config or run.files]
    ours.sort(key=lambda run: run.begun)
    if len(ours) < len(found):
        note(f"left out: {len(found) - len(ours)} runs that are not of this package")
    if not ours and not places:
        reject(f"runs of train.py in {', '.join(sources)}", "none", "look at --wandb")
    for run, name in zip(ours, _names(ours), strict=True):
        places += _lay_out(run, directory / name)
    return places


def _names(runs: Sequence[_Found]) -> list[str]:
    """Call each run by the last part of its name, or by as much as it takes to tell it apart."""
    # No name may lead out of the directory.
    names = ([part for part in run.name.split("/") if part.strip(".")] for run in runs)
    parts = [name or [run.id] for name, run in zip(names, runs, strict=True)]
    choices = [
        [each[-1] for each in parts],
        ["_".join(each) for each in parts],
        [f"{each[-1]}-{run.id}" for each, run in zip(parts, runs, strict=True)],
    ]
    return [
        next(name for names in choices if names.count(name := names[number]) == 1)
        for number in range(len(runs))
    ]


def _lay_out(run: _Found, place: Path) -> list[Path]:
    """Write a run's settings, log and evaluations; a checkpoint's are beside it."""
    places = []
    if "method" in run.config:
        place.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in run.config.items() if not _is_about(name)}
        write_json(place / RUN_FILE, settings)
        log = _log(run.history)
        last = max((entry["step"] for entry in log), default=0)
        state = {"max_steps": run.config.get("steps", last), "global_step": last}
        state["total_flos"] = max((entry.get("total_flos", 0) for entry in log), default=0)
        write_json(place / "trainer_state.json", {**state, "log_history": log})
        places.append(place)
    for name, put in run.files.items():
        _, *part, file = PurePosixPath(name).parts
        of_model = place.with_name("-".join([place.name, *part]))
        (of_model / EVALUATION_FOLDER).mkdir(parents=True, exist_ok=True)
        put(of_model / EVALUATION_FOLDER / file)
        if file == RESULTS_FILE and of_model not in places:
            places.append(of_model)
    return places


def _is_about(name: str) -> bool:
    # Those of checkpoints are called evaluation_checkpoint-500.
    return name in ABOUT or name.startswith(("_wandb", EVALUATION_FOLDER))


def _log(history: Sequence[JsonObject]) -> list[JsonObject]:
    """Turn rows into entries of a log; what is no number, as tables, has no entry."""
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


# -- Files -----------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """Find the files of runs in a directory of one or of many, or the file itself."""
    if path.suffix == ".wandb":
        return [path]
    found = list(path.glob("run-*.wandb")) or path.glob("*run-*/run-*.wandb")
    # In the order of their times: run-TIME-ID and offline-run-TIME-ID.
    return sorted(found, key=lambda file: file.parent.name.partition("run-")[2])


def _read_files(files: Sequence[Path]) -> dict[str, _Found]:
    found: dict[str, _Found] = {}
    if files:
        import_wandb()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, records in zip(files, pool.map(wandb_records, files), strict=True):
            # Named run-ID.wandb; a run that was resumed or evaluated has several.
            run = found.setdefault(path.stem[4:], _Found(path.stem[4:]))
            for record in records:
                _take(record, run)
            folder = path.parent / "files"
            for file in sorted((folder / EVALUATION_FOLDER).rglob("*.json*")):
                name = file.relative_to(folder).as_posix()
                run.files[name] = partial(shutil.copyfile, file)
    return found


def wandb_records(path: Path) -> list[JsonObject]:
    """Read a file as `wandb leet inspect --json` prints it: a record a line."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    # It would tell its server that it is used.
    environment = os.environ | {"WANDB_MODE": "offline"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[-200:]
        raise ValueError(f"{path}: expected a file of Weights & Biases, found {reason}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _take(record: JsonObject, run: _Found) -> None:
    about = record.get(record["type"], {})
    if record["type"] == "run":
        run.name = about.get("display_name") or run.name
        run.begun = run.begun or about.get("start_time", "")
        run.config |= about.get("config", {}).get("update", {})
    elif record["type"] == "config":
        run.config |= about.get("update", {})
    elif record["type"] == "history":
        run.history.append(about["item"])


# -- The server ------------------------------------------------------------------------------


def _ask(project: str) -> dict[str, _Found]:
    wandb = import_wandb()
    try:
        if not wandb.login(prompt=False):
            reject(f"a key to read --wandb {project} with", "none", "`wandb login` asks for it")
        runs = list(wandb.Api(timeout=60).runs(project, lazy=False))
        return {run.id: _read_run_of_server(run) for run in runs}
    except (wandb.errors.Error, ValueError) as error:
        raise ValueError(f"--wandb {project}: {' '.join(str(error).split())}") from error


def _read_run_of_server(run: Any) -> _Found:
    files: dict[str, Callable[[Path], object]] = {
        file.name: partial(_download, file) for file in run.files(pattern=f"{EVALUATION_FOLDER}/%")
    }
    rows = run.history(samples=_ROWS, pandas=False)
    return _Found(run.id, run.name or run.id, run.created_at or "", dict(run.config), rows, files)


def _download(file: Any, place: Path) -> None:
    with TemporaryDirectory() as scratch:
        file.download(root=scratch).close()
        shutil.move(Path(scratch, file.name), place)
