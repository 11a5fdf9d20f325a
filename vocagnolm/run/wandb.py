"""A run in Weights & Biases, TensorBoard and trackio: docs/wandb.md.

transformers' callbacks send the logs. Here every entry of a log gets a section, a run of Weights &
Biases begins with its place among others, and all trackers learn what a run is made of. Evaluations
join the run that trained the model, and runs are fetched to be compared.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import Trainer
from transformers.integrations import integration_utils
from transformers.trainer import TRAINER_STATE_NAME

from vocagnolm.cli import log_main
from vocagnolm.extras import require_trackers
from vocagnolm.io import RUN_FILE, JsonObject, json_or_empty, versions, write_json
from vocagnolm.run.options import RunOptions

if TYPE_CHECKING:
    from vocagnolm.run.job import Documents, Job, Models

# In the directory of a run: its place in Weights & Biases. Beside a model: its evaluation.
_PLACE_FILE, _EVALUATION = "wandb_run.json", "evaluation"
STEP = "train/global_step"
# More rows than a run ever logs: the server is to leave none out.
_ROWS = 1_000_000
# Entries of a log in trackers; transformers names all others, as eval/loss and train/loss.
_NAMES = {
    "selected_fraction": "guidance/selected_fraction",
    "mean_weight": "guidance/mean_weight",
    "unmapped_fraction": "guidance/unmapped_fraction",
    "teacher_ahead_fraction": "guidance/teacher_ahead_fraction",
    "excess_loss_p10_nats": "guidance/excess_loss_p10_nats",
    "excess_loss_p50_nats": "guidance/excess_loss_p50_nats",
    "excess_loss_p90_nats": "guidance/excess_loss_p90_nats",
    "teacher_loss_nats": "teacher/loss_nats",
    "teacher_tokens_per_student_token": "teacher/tokens_per_student_token",
    "distance_from_teacher": "teacher/distance_from_teacher",
    "tokens_per_s": "speed/tokens_per_s",
    "student_mfu": "speed/student_mfu",
    "teacher_mfu": "speed/teacher_mfu",
    "teacher_time_fraction": "speed/teacher_time_fraction",
    "memory_allocated_gib": "memory/allocated_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "memory_resident_gib": "memory/resident_gib",
}
_ENTRIES = {name: entry for entry, name in _NAMES.items()}
_rewrite_logs: Callable[[JsonObject], JsonObject] = integration_utils.rewrite_logs


def tracked(logs: Mapping[str, object]) -> JsonObject:
    """Return a log under the names that trackers get: ours, else those of transformers.

    >>> tracked({"teacher_loss_nats": 1.5, "eval_math_loss": 2.0, "new": 3})
    {'teacher/loss_nats': 1.5, 'eval/math_loss': 2.0, 'train/new': 3}
    """
    return {
        _NAMES.get(entry) or next(iter(_rewrite_logs({entry: value}))): value
        for entry, value in logs.items()
    }


def log_name(name: str) -> str:
    """Return the entry of a log that trackers get under a name; of others, their last part.

    >>> log_name("teacher/loss_nats"), log_name("eval/math_loss"), log_name("train/new")
    ('teacher_loss_nats', 'eval_math_loss', 'new')
    """
    section, _, rest = name.partition("/")
    return _ENTRIES.get(name) or (f"eval_{rest}" if section == "eval" else rest or section)


# -- Places ------------------------------------------------------------------------------------


def place(job: Job, settings: Mapping[str, Any]) -> JsonObject:
    """Return the arguments of `wandb.init` that place a run among others.

    Options win over the environment, and that over the recipe, whose folder is the experiment.
    """
    run, environment, recipe = job.args, os.environ.get, tuple[str, ...]()
    if job.recipe:
        # Its path below the last `recipes`, or its folder and name.
        parts = Path(job.recipe).resolve().with_suffix("").parts
        recipe = parts[-parts[::-1].index("recipes") if "recipes" in parts else -2 :]
    project = run.project
    if project == RunOptions.project:
        project = environment("WANDB_PROJECT", project)
    entity, _, project = project.rpartition("/")
    teachers = settings["teacher"] or [s["teacher"] for s in settings["teacher_losses"] or ()]
    names = [Path(name).name for name in (settings["student"], *teachers)]
    tags = environment("WANDB_TAGS", ",".join([run.method, *names])).split(",")
    name = run.run_name or environment("WANDB_NAME") or "/".join(recipe)
    return {
        "entity": entity or None,
        "project": project,
        "group": environment("WANDB_RUN_GROUP") or "/".join(recipe[:-1]) or None,
        "name": name or Path(str(run.output_dir)).resolve().name,
        # Longer ones are invalid.
        "tags": [tag[-64:] for tag in tags if tag],
    }


def _read_place(directory: Path) -> JsonObject:
    """Read the arguments of `wandb.init` that continue the run of a directory; {} without one."""
    found = json_or_empty(directory / _PLACE_FILE)
    return {**found, "resume": "allow"} if found else {}


def check_trackers(report_to: Sequence[str]) -> None:
    """Check that trackers can be used, before hours of work; Weights & Biases may ask for a key.

    Raises:
        ValueError: a package is missing.
    """
    require_trackers(report_to)
    try:
        for make in integration_utils.get_reporting_integration_callbacks(report_to):  # type: ignore[no-untyped-call]
            make()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"--report_to {' '.join(report_to)}: {error}") from error
    if "wandb" in report_to:
        import wandb

        # Without a key the run begins offline.
        with suppress(wandb.Error):
            wandb.login()


def begin_run(arguments: Mapping[str, Any]) -> Any:
    """Begin a run of Weights & Biases, offline where the server does not take it."""
    import wandb

    try:
        run = wandb.init(**arguments)
    except wandb.Error as error:
        run = wandb.init(**arguments, mode="offline")
        reason = " ".join(str(error).split())
        log_main(f"wandb      offline ({reason}); `wandb sync {run.settings.sync_dir}` sends it")
    return run


# -- A run of training -------------------------------------------------------------------------


def begin(trainer: Trainer, job: Job, about: Mapping[str, Any], *, is_resumed: bool) -> None:
    """Begin a run in all trackers, before it trains; on rank 0.

    A run that was cut off and resumed is one run, in Weights & Biases too.
    """
    # transformers' callbacks look it up whenever they log.
    integration_utils.rewrite_logs = tracked
    args, where = trainer.args, place(job, about["settings"])
    args.project, args.run_name = where["project"], where["name"]
    if "wandb" in (args.report_to or ()):
        directory = Path(str(args.output_dir))
        known = _read_place(directory) if is_resumed else {}
        arguments = {**where, **known, "config": dict(about)}
        run = begin_run(arguments)
        found = {"id": run.id, "project": run.project, "entity": run.entity or None}
        write_json(directory / _PLACE_FILE, {**arguments, **found})


def finish() -> None:
    """End the run of Weights & Biases, which Trainer leaves to those who have begun it."""
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()


def about(
    job: Job, models: Models, documents: Documents, settings: Mapping[str, object]
) -> JsonObject:
    """Describe a run by what runs are filtered and grouped by."""
    student, segments, blocks = models.student.sizes, documents.segments, documents.blocks
    found = {
        "settings": settings,
        "recipe": job.recipe,
        "parameters": student.parameters,
        "trained_parameters": student.trained,
        "teacher_parameters": [teacher.sizes.parameters for teacher in models.teachers],
        "corpus": {
            "documents": len(np.unique(segments.rows.with_format("numpy")["document"][:])),
            "student_tokens": segments.total("student_tokens"),
            "teacher_tokens": segments.total("teacher_tokens"),
            "blocks": len(blocks),
            "fill_fraction": blocks.fill_fraction,
        },
        "code": versions("vocagnolm torch transformers accelerate datasets"),
    }
    # As JSON has it: wandb would write the names of Enum members, not their values.
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


# -- Evaluations -------------------------------------------------------------------------------


def log_evaluation(results: JsonObject, directory: Path) -> None:
    """Put the accuracies into the summary of a run, and the item files among its files.

    A checkpoint's are in the run that wrote it, as `eval/checkpoint-500/gsm8k/...`.
    """
    name = results["model"]["name"]
    model, parts = Path(name).resolve(), []
    known = _read_place(model)
    if not known and model.is_dir() and (known := _read_place(model.parent)):
        parts.append(model.name)
    if results["settings"].get("protocol"):
        parts.append("chat")
    part = "-".join(parts)
    if not known:
        project = os.environ.get("WANDB_PROJECT", RunOptions.project)
        known = {"project": project, "name": f"evaluation of {name}"}
    entry = "_".join(filter(None, (_EVALUATION, part)))
    own = {entry: {key: results[key] for key in ("model", "settings", "environment")}}
    with begin_run({**known, "config": known.get("config", {}) | own}) as run:
        for column, values in {**results["benchmarks"], **results["averages"]}.items():
            # A slash would begin a part of the name.
            names = ("eval", part, column.replace("w/o", "without"), *values["marked"])
            prefix = "/".join(filter(None, names))
            run.summary[f"{prefix}/accuracy_percent"] = values["rounded"]
            if "n" in values:
                run.summary[f"{prefix}/items"] = values["n"]
        copies = Path(run.dir, _EVALUATION, part)
        copies.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.json*"):
            shutil.copy(path, copies)
        run.save(f"{copies}/*", base_path=run.dir, policy="end")


# -- Runs of the server ------------------------------------------------------------------------


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
    files = {run.id: list(run.files(pattern=f"{_EVALUATION}/%")) for run in runs}
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
            (model / _EVALUATION).mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory() as scratch:
                file.download(root=scratch).close()
                shutil.move(Path(scratch, file.name), model / _EVALUATION / file_name)
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
