"""A training run in Weights & Biases, TensorBoard and trackio; see docs/wandb.md.

transformers' callbacks send the logs. This module gives every entry of a log a section, gives a run
of Weights & Biases its place among others, and describes a run to all trackers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.integrations import integration_utils

from vocagnolm.shell.io import JsonObject, is_main, versions, write_json
from vocagnolm.training.job import Job
from vocagnolm.training.models import Models
from vocagnolm.training.options import RunOptions
from vocagnolm.training.packed import Packed
from vocagnolm.training.tracking import PLACE_FILE, begin_run, read_place, tracked


def wandb_arguments(job: Job, settings: Mapping[str, Any]) -> JsonObject:
    """Return the arguments of `wandb.init` that give a run its place among others.

    Options override the environment, and the environment overrides the recipe, whose folder is the
    experiment.
    """
    run, environment, recipe = job.args, os.environ.get, tuple[str, ...]()
    if job.recipe:
        parts = Path(job.recipe).resolve().with_suffix("").parts
        # The name of a package's recipe is its path below `recipes`, and its last directory is the
        # experiment. For any other file, it is the file's folder.
        recipe = parts[-2:]
        if "recipes" in parts[:-1]:
            folder = len(parts) - 1 - parts[::-1].index("recipes", 1)
            recipe = parts[folder + 1 :]
    project = run.project
    # The option's default counts as no answer, so that the environment can decide.
    if project == RunOptions.project:
        project = environment("WANDB_PROJECT", project)
    entity, _, project = project.rpartition("/")
    teachers = settings["teacher"]
    if not teachers:
        # A teacher may have several stores.
        teachers = dict.fromkeys(store["teacher"] for store in settings["teacher_losses"] or ())
    names = [Path(name).name for name in (settings["student"], *teachers)]
    tags = environment("WANDB_TAGS", ",".join([run.method, *names])).split(",")
    name = run.run_name or environment("WANDB_NAME") or "/".join(recipe)
    return {
        "entity": entity or None,
        "project": project,
        "group": environment("WANDB_RUN_GROUP") or "/".join(recipe[:-1]) or None,
        "name": name or Path(str(run.output_dir)).resolve().name,
        # Weights & Biases rejects tags of more than 64 characters. The end of a path says more than
        # its beginning.
        "tags": [tag[-64:] for tag in tags if tag],
    }


@contextmanager
def running(
    trainer: Trainer, job: Job, description: JsonObject, *, is_resumed: bool
) -> Iterator[None]:
    """Describe the run that trains inside to all trackers.

    A run that was interrupted and resumed is one run, in Weights & Biases, too.
    """
    if not is_main():
        yield
        return
    args = trainer.args
    where = wandb_arguments(job, description["settings"])
    # Other trackers' callbacks read these two arguments when training begins.
    args.project, args.run_name = where["project"], where["name"]
    if "wandb" in (args.report_to or ()):
        directory = Path(str(args.output_dir))
        # What was written when the run began wins. Otherwise a renamed run would begin another one.
        arguments = where | (read_place(directory) if is_resumed else {})
        arguments["config"] = description
        run = begin_run(arguments)
        # wandb has chosen the id, and perhaps the entity. The resumed run must give both again.
        arguments |= {"id": run.id, "project": run.project, "entity": run.entity or None}
        write_json(directory / PLACE_FILE, arguments)
    # transformers' callbacks look this function up whenever they log, so it is replaced during
    # training.
    library_names = integration_utils.rewrite_logs
    integration_utils.rewrite_logs = tracked
    try:
        yield
    finally:
        integration_utils.rewrite_logs = library_names


def finish() -> None:
    """End the run of Weights & Biases, which Trainer leaves open."""
    # The package is optional. A run that did not ask for it has not imported it.
    if "wandb" in sys.modules and sys.modules["wandb"].run is not None:
        sys.modules["wandb"].finish()


def about(job: Job, models: Models, packed: Packed, settings: Mapping[str, Any]) -> JsonObject:
    """Describe a run by the values that trackers filter and group by."""
    student, segments, blocks = models.student.sizes, packed.segments, packed.blocks
    assert segments
    description = {
        "settings": settings,
        "recipe": job.recipe,
        "parameters": student.parameters,
        "trained_parameters": student.trained,
        "teacher_parameters": [teacher.sizes.parameters for teacher in models.teachers],
        "corpus": {
            "documents": sum(part.count_documents() for part in packed.parts),
            "student_tokens": segments.total("student_tokens"),
            "teacher_tokens": segments.total("teacher_tokens"),
            "blocks": len(blocks),
            "fill_fraction": blocks.fill_fraction,
        },
        "code": versions("vocagnolm torch transformers accelerate datasets"),
    }
    # Convert the description to JSON and back, because wandb would write Enum members' names and
    # not their values.
    return json.loads(json.dumps(description, default=str))  # type: ignore[no-any-return]
