"""A run in Weights & Biases, TensorBoard and trackio: where it is, and the names of its entries."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils

from vocagnolm.fields import OptionError
from vocagnolm.shell.io import JsonObject, json_or_empty, log_main

# This file in a run's directory has its place in Weights & Biases, so that a resumed run continues
# the same curves.
PLACE_FILE = "wandb_run.json"
# An evaluation writes into this directory, next to the model.
EVALUATION = "evaluation"
# Trackers get these entries of a log under these names. transformers names all others, for example
# eval/loss and train/loss.
_NAMES = {
    "selected_fraction": "guidance/selected_fraction",
    "mean_weight": "guidance/mean_weight",
    "unmapped_fraction": "guidance/unmapped_fraction",
    "teacher_ahead_fraction": "guidance/teacher_ahead_fraction",
    "teacher_loss_nats": "teacher/loss_nats",
    "teacher_tokens_per_student_token": "teacher/tokens_per_student_token",
    "distance_from_teacher": "teacher/distance_from_teacher",
    "tokens_per_s": "speed/tokens_per_s",
    "mfu": "speed/mfu",
    "memory_allocated_gib": "memory/allocated_gib",
    "memory_reserved_gib": "memory/reserved_gib",
    "memory_resident_gib": "memory/resident_gib",
}
_ENTRIES = {name: entry for entry, name in _NAMES.items()}
# Keep the original function under its own name, because a run replaces it by `tracked`.
_rewrite_logs: Callable[[JsonObject], JsonObject] = integration_utils.rewrite_logs


def tracked(logs: Mapping[str, object]) -> JsonObject:
    """Return a log under the names for trackers: ours, or else those of transformers.

    >>> tracked({"teacher_loss_nats": 1.5, "eval_math_loss": 2.0, "new": 3})
    {'teacher/loss_nats': 1.5, 'eval/math_loss': 2.0, 'train/new': 3}
    """
    renamed: JsonObject = {}
    for entry, value in logs.items():
        name = _NAMES.get(entry)
        if name is None:
            # The function of transformers renames whole logs, so it gets one with a single entry.
            (name,) = _rewrite_logs({entry: value})
        renamed[name] = value
    return renamed


def log_name(name: str) -> str:
    """Return the entry of a log that has this name in trackers. For others, it is the last part.

    >>> log_name("teacher/loss_nats"), log_name("eval/math_loss"), log_name("train/new")
    ('teacher_loss_nats', 'eval_math_loss', 'new')
    """
    section, _, entry = name.partition("/")
    return _ENTRIES.get(name) or (f"eval_{entry}" if section == "eval" else entry or section)


def read_place(directory: Path) -> JsonObject:
    """Read the arguments of `wandb.init` that continue the run of a directory, or {}."""
    place = json_or_empty(directory / PLACE_FILE)
    if place:
        # If the server does not know the run, as after an offline start, it begins again.
        place["resume"] = "allow"
    return place


def check_trackers(report_to: Sequence[str]) -> None:
    """Check that trackers work, before hours of work. Weights & Biases may ask for a key.

    Raises:
        ValueError: a package is missing.
    """
    try:
        # A callback looks for its package when it is made. This one is thrown away.
        for make in integration_utils.get_reporting_integration_callbacks(report_to):  # type: ignore[no-untyped-call]
            make()
    except (ImportError, RuntimeError) as error:
        raise OptionError("report_to", f"{' '.join(report_to)}: {error}") from error
    if "wandb" in report_to:
        import wandb

        # This asks for a key while the user is there. Without one, the run begins offline.
        with suppress(wandb.Error):
            wandb.login()


def begin_if_none(args: Any) -> None:
    """Begin a run of Weights & Biases for a trainer in Python, unless one is open."""
    import wandb

    if wandb.run is None:
        project = os.environ.get("WANDB_PROJECT", args.project)
        begin_run({"project": project, "name": args.run_name})


def begin_run(arguments: Mapping[str, Any]) -> Any:
    """Begin a run of Weights & Biases, offline if the server does not accept it."""
    import wandb

    try:
        run = wandb.init(**arguments)
    except wandb.Error as error:
        # The tracker must not keep a run from training. What it logs can be sent later. The service
        # of the failed start still holds the run's id, until it is torn down.
        wandb.teardown()
        run = wandb.init(**arguments, mode="offline")
        reason = " ".join(str(error).split())
        log_main(f"wandb      offline ({reason}); `wandb sync {run.settings.sync_dir}` sends it")
    return run
