"""A run that goes on for longer: which settings may grow, and whether its past stays as it was."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler
from transformers.trainer import TRAINER_STATE_NAME

from vocagnolm.fields import named
from vocagnolm.record import Record, differences
from vocagnolm.shell.io import json_or_empty

_LENGTHS = ("max_steps", "num_train_epochs")


def grown(before: Record, now: Record) -> list[str]:
    """Name the settings with which a run is now longer than it was."""
    return [name for name in _LENGTHS if now.get(name, -1) > before.get(name, math.inf)]


def changes_of(before: Record, now: Record, checkpoint: Path | None) -> list[str]:
    """List in words what keeps a run from going on at a checkpoint, as `differences` does.

    It may become longer. If its steps so far would then have had other learning rates, it must be
    asked for by `extend`.
    """
    as_before = {name: value for name, value in now.items() if name != "extend"}
    longer = grown(before, now)
    for name in longer:
        as_before[name] = before[name]
    changes = differences(before, as_before)
    state = json_or_empty(checkpoint / TRAINER_STATE_NAME) if longer and checkpoint else {}
    # Until a checkpoint is found, there is no past.
    if not state:
        return changes
    done, steps = state["global_step"], now["max_steps"]
    if steps <= 0:
        steps = math.ceil(state["max_steps"] * now["num_train_epochs"] / before["num_train_epochs"])
    if steps <= done:
        changes.append(f"{named('max_steps')} {steps} is not above the {done} steps already made")
    elif not now.get("extend") and _pace(now, steps, done) != _pace(now, state["max_steps"], done):
        changes.append(
            f"in a run of {steps} steps, the {done} already made would have had other learning "
            f"rates or shares of tokens, which {named('extend')} true accepts"
        )
    return changes


def _pace(settings: Record, steps: int, done: int) -> list[Any]:
    """Return the learning rates up to the next step, and the length of the warm-up of top_k."""
    warmups = []
    for name in ("warmup_steps", "top_k_warmup_steps"):
        share = settings.get(name) or 0
        warmups.append(math.ceil(steps * share) if share < 1 else int(share))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=settings["learning_rate"])
    schedule: Any = get_scheduler(
        settings["lr_scheduler_type"],
        optimizer,
        warmups[0],
        steps,
        settings["lr_scheduler_kwargs"],
    )
    rates = [warmups[1]]
    # The others depend on losses alone.
    for rate in getattr(schedule, "lr_lambdas", ()):
        rates += map(rate, range(done + 1))
    return rates
