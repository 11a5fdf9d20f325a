"""A run in Weights & Biases, TensorBoard and trackio: docs/wandb.md.

transformers' callbacks send the logs. Here every entry of a log gets a section, a run of Weights &
Biases begins with its place among others, and all trackers learn what a run is made of.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from vocagnolm.cli import log_main
from vocagnolm.io import JsonObject, json_or_empty, markdown_table, versions, write_json
from vocagnolm.run.options import RunOptions

if TYPE_CHECKING:
    from vocagnolm.run.documents import Documents
    from vocagnolm.run.job import Job, Models

# In the directory of a run: its place in Weights & Biases.
PLACE_FILE = "wandb_run.json"
STEP = "train/global_step"
EXCESS_HISTOGRAM, GUIDANCE_TABLE = "guidance/excess_loss_nats", "guidance/tokens"
# transformers names all others: eval/... and train/...
_SECTIONS = {
    "guidance": (
        "selected_fraction unmapped_fraction excess_loss_p10_nats excess_loss_p50_nats "
        "excess_loss_p90_nats"
    ),
    "teacher": "teacher_loss_nats teacher_tokens_per_student_token distance_from_teacher",
    "speed": "tokens_per_s student_mfu teacher_mfu teacher_time_fraction",
    "memory": "memory_allocated_gib memory_reserved_gib memory_resident_gib",
}
# A section's own name in front of an entry's is left out: teacher_loss_nats is teacher/loss_nats.
_NAMES = {
    entry: f"{section}/{entry.removeprefix(f'{section}_')}"
    for section, entries in _SECTIONS.items()
    for entry in entries.split()
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
    run, environment, recipe = job.run, os.environ.get, _recipe_parts(job.recipe)
    project = run.project
    if project == RunOptions.project:
        project = environment("WANDB_PROJECT", project)
    entity, _, project = project.rpartition("/")
    teachers = settings["teacher"] or [s["teacher"] for s in settings["teacher_losses"] or ()]
    names = [Path(name).name for name in (settings["student"], *teachers)]
    tags = environment("WANDB_TAGS", ",".join([job.method.method, *names])).split(",")
    name = run.run_name or environment("WANDB_NAME") or "/".join(recipe)
    return {
        "entity": entity or None,
        "project": project,
        "group": environment("WANDB_RUN_GROUP") or "/".join(recipe[:-1]) or None,
        "name": name or Path(str(run.output_dir)).resolve().name,
        # Longer ones are invalid.
        "tags": [tag[-64:] for tag in tags if tag],
    }


def _recipe_parts(recipe: str | None) -> tuple[str, ...]:
    """Return the path of a recipe below the last `recipes`, or its folder and name."""
    if not recipe:
        return ()
    parts = Path(recipe).resolve().with_suffix("").parts
    below = parts[::-1].index("recipes") if "recipes" in parts else 2
    return parts[-below:]


def read_place(directory: Path) -> JsonObject:
    """Read the arguments of `wandb.init` that continue the run of a directory; {} without one."""
    found = json_or_empty(directory / PLACE_FILE)
    return {**found, "resume": "allow"} if "id" in found else {}


def check_trackers(report_to: Sequence[str]) -> None:
    """Check that trackers can be used, before hours of work; Weights & Biases may ask for a key.

    Raises:
        ValueError: a package is missing.
    """
    try:
        for make in integration_utils.get_reporting_integration_callbacks(report_to):  # type: ignore[no-untyped-call]
            make()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"--report_to {' '.join(report_to)}: {error}") from error
    if "wandb" in report_to:
        wandb = import_module("wandb")
        # Without a key the run begins offline.
        with suppress(wandb.Error):
            wandb.login()


def begin_run(arguments: Mapping[str, Any]) -> Any:
    """Begin a run of Weights & Biases, offline where the server does not take it."""
    wandb = import_module("wandb")
    try:
        run = wandb.init(**arguments)
    except wandb.Error as error:
        run = wandb.init(**arguments, mode="offline")
        reason = " ".join(str(error).split())
        log_main(f"wandb      offline ({reason}); `wandb sync {run.settings.sync_dir}` sends it")
    return run


# -- A run of training -------------------------------------------------------------------------


def begin(trainer: Trainer, job: Job, about: Mapping[str, Any], *, is_resumed: bool) -> Extras:
    """Begin a run in all trackers, before it trains; on rank 0.

    A run that was cut off and resumed is one run, in Weights & Biases too.
    """
    # transformers' callbacks look it up whenever they log.
    integration_utils.rewrite_logs = tracked
    args, where = trainer.args, place(job, about["settings"])
    args.project, args.run_name = where["project"], where["name"]
    extras = Extras(trainer, about)
    trainer.add_callback(extras)
    if "wandb" in (args.report_to or ()):
        directory = Path(str(args.output_dir))
        known = read_place(directory) if is_resumed else {}
        arguments = {**where, **known, "config": dict(about)}
        run = begin_run(arguments)
        found = {"id": run.id, "project": run.project, "entity": run.entity or None}
        write_json(directory / PLACE_FILE, {**arguments, **found})
    return extras


class Extras(TrainerCallback):
    """Shows what transformers' callbacks do not: what a run is made of, histograms and tables."""

    def __init__(self, trainer: Any, about: Mapping[str, Any]):
        self._trainer, self._about = trainer, about

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Show TensorBoard what the run is made of, which wandb knows already."""
        for board in self._boards():
            board.add_text("config", f"```json\n{json.dumps(self._about, indent=2)}\n```")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, object] | None = None,
        **_: object,
    ) -> None:
        """Send the sample of excess losses whose quantiles the log has."""
        sample = self._trainer.metrics.excess_sample
        if sample is None or "excess_loss_p50_nats" not in (logs or {}):
            return
        for board in self._boards():
            board.add_histogram(EXCESS_HISTOGRAM, sample, state.global_step)
        self._log(EXCESS_HISTOGRAM, state.global_step, "Histogram", sample.tolist())

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        """Send the table of the guidance of a sample's tokens."""
        shown = [[str(cell) for cell in row] for row in (columns, *rows)]
        for board in self._boards():
            board.add_text(GUIDANCE_TABLE, markdown_table(shown), step)
        self._log(GUIDANCE_TABLE, step, "Table", list(columns), [list(row) for row in rows])

    def _boards(self) -> list[Any]:
        """Return the writers of TensorBoard."""
        callbacks = self._trainer.callback_handler.callbacks
        found = (getattr(callback, "tb_writer", None) for callback in callbacks)
        return [board for board in found if board is not None]

    def _log(self, name: str, step: int, kind: str, *made_of: object) -> None:
        """Send Weights & Biases one of its own kinds of values."""
        if "wandb" in self._trainer.args.report_to:
            wandb = import_module("wandb")
            wandb.log({name: getattr(wandb, kind)(*made_of), STEP: step})


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
