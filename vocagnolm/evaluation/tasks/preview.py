"""What a model would be asked, before it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vocagnolm.evaluation.engines.generation import shared_length
from vocagnolm.evaluation.tasks.tasks import Task


def preview(task: Task, tokenizer: Any, context: int | None) -> str:
    """The first whole prompt of a benchmark, and the token counts of all.

    Args:
        task: what is asked.
        tokenizer: of the model.
        context: tokens of the model's context; None without a limit.
    """
    prompts = list(task.prompts.values())
    ids: list[list[int]] = tokenizer(prompts, verbose=False)["input_ids"]
    lengths = list(map(len, ids))
    shared = shared_length(ids)
    lines = [
        f"=== {task.benchmark.id} ({task.benchmark.column}): {len(prompts)} items, "
        f"{task.benchmark.shots} shots, data {task.loaded.origin}",
        *(f"--- {mark}" for mark in task.marks().values()),
        f"--- prompt tokens: {min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(ids):.0f}; "
        f"the first {shared} are shared",
        f"--- new tokens: at most {task.benchmark.max_new_tokens}{_left(lengths, context)}",
        prompts[0],
    ]
    return "\n".join(lines) + "\n"


def _left(lengths: Sequence[int], context: int | None) -> str:
    if context is None:
        return ""
    too_long = sum(length >= context for length in lengths)
    warning = f"; {too_long} prompts do not fit" if too_long else ""
    return f", and {context} with the prompt{warning}"
