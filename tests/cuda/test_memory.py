"""The plan of a run on one GPU against the peak of its tensors, at the paper's sizes.

TinyLlama 1.1B with AdamW, and Qwen2.5-Math-7B in 16 bits; two micro-batches of 8 rows of 2,048
tokens. Several GPUs: test_sharded.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import Watch
from fake_processes import start_first
from fake_run import make_run, one_step, planned

from vocagnolm.method import Method


def peak_and_plan(method: str, attention: str, options: dict[str, Any]) -> tuple[float, float]:
    """Return the peak bytes of a step, and the bytes planned for it."""
    start_first("single_gpu")
    with Watch() as watch:
        trainer = make_run(Method(method), attention, "full", 8, **options)
        plan = planned(trainer)
        return one_step(watch, trainer).peak, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "attention", "options"),
    [
        ("vocagnolm", "torch_varlen", {}),
        ("vocagnolm", "sdpa", {}),
        ("vocagnolm", "torch_varlen", {"gradient_checkpointing": True}),
        ("vocagnolm", "torch_varlen", {"lora": True}),
    ],
)
def test_plan_is_within_three_per_cent_of_what_tensors_take(
    method: str,
    attention: str,
    options: dict[str, Any],
    on_fake_cuda: Callable[..., tuple[float, float]],
) -> None:
    peak, plan = on_fake_cuda(peak_and_plan, method, attention, options)
    assert plan == pytest.approx(peak, rel=0.03)
