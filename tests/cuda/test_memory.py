"""The plan of a run against the peak of its tensors, at the paper's sizes, and the waits of shards.

TinyLlama 1.1B with AdamW, and Qwen2.5-Math-7B in 16 bits; two micro-batches of 8 rows of 2,048
tokens. With a configuration of `accelerate_configs/` only rank 0 runs; the other processes do not
exist. DDP is left to arithmetic, as its reducer reads memory: it reduces 4 bytes a parameter once a
step, in buckets that take as much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import Watch
from fake_processes import start_first
from fake_run import Step, check_step, make_run, one_step, planned

from vocagnolm.method import Method

VARLEN = "torch_varlen"


def step_and_plan(config: str, attention: str, options: dict[str, Any]) -> tuple[Step, float]:
    """Take a step, as the first process of a configuration; return it and the planned bytes."""
    if config:
        start_first(config)
    with Watch() as watch:
        trainer = make_run(Method(), attention, "full", 8, **options)
        plan = planned(trainer)
        return one_step(watch, trainer), plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "options"),
    [
        ("", VARLEN, {}),
        ("", "sdpa", {}),
        ("", VARLEN, {"gradient_checkpointing": True}),
        ("", VARLEN, {"lora": True}),
        ("fsdp2", VARLEN, {}),
        ("fsdp2_32xh100", VARLEN, {"teacher_sharding": "node"}),
        ("hsdp_32xh100", VARLEN, {}),
    ],
)
def test_step_takes_what_the_plan_says(
    config: str,
    attention: str,
    options: dict[str, Any],
    on_fake_cuda: Callable[..., tuple[Step, float]],
) -> None:
    step, plan = on_fake_cuda(step_and_plan, config, attention, options)
    assert plan == pytest.approx(step.peak, rel=0.03)
    check_step(step, attention)
