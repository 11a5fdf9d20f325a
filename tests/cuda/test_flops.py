"""FLOPs of the logged MFU against those that torch counts in a step on the fake device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fake_cuda import Watch
from fake_run import make_run, one_step
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import count_tokens
from vocagnolm.collator import PackedCollator
from vocagnolm.models.cost import model_work

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def counted_and_computed() -> tuple[int, float]:
    """Count a step's FLOPs of products, and compute them from the tokens that were read."""
    batches: list[Any] = []
    own = PackedCollator.__call__

    def collate(collator: PackedCollator, rows: Any) -> Any:
        batches.append(own(collator, rows))
        return batches[-1]

    PackedCollator.__call__ = collate  # type: ignore[method-assign, assignment]
    with Watch() as watch:
        trainer = make_run()
        with FlopCounterMode(display=False) as counter:
            one_step(watch, trainer)
        student, teacher = map(model_work, (trainer.model, *trainer.online_teachers))
    computed = 0.0
    for batch in batches:
        tokens, _ = count_tokens([batch])
        used = trainer.token_objective.weighted_tokens(batch)
        computed += student.training_flops(tokens, 0, used)
        # What the formula leaves out on purpose: padding, and logits made again for the gradient.
        computed += 6 * student.body * (batch["labels"].numel() - tokens) + 2 * student.head * used
        tokens, _ = count_tokens([batch], "teacher_")
        computed += teacher.forward_flops(tokens, 0, tokens)
        computed += 2 * teacher.body * (batch["teacher_labels"].numel() - tokens)
    found = counter.get_flop_counts()["Global"]
    # The attention kernel is not counted, so the formula gets no keys.
    return sum(found[product] for product in PRODUCTS), computed


def test_flops_are_those_that_torch_counts(on_fake_cuda: Callable[..., tuple[int, float]]) -> None:
    counted, computed = on_fake_cuda(counted_and_computed)
    assert counted == computed
