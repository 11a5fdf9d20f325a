"""Steps of as many processes as the files of `accelerate_configs/` start: waits, messages, memory.

Models and micro-batches are those of test_memory.py. Rank 0 runs, beside processes that are not
there. DDP is left to arithmetic, as its reducer reads memory: 4 bytes a parameter are reduced
once a step, in buckets that take as much memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from fake_cuda import Watch
from fake_processes import start_first
from fake_run import Step, check_step, make_run, one_step, planned

from vocagnolm.method import Method
from vocagnolm.run.plan import sizes_of

Sharded = tuple[Step, float, int, int]
GATHER = "_allgather_base_", torch.bfloat16
SCATTER = "_reduce_scatter_base_", torch.float32
REDUCE = "allreduce_", torch.float32
# The divisor, and what the guard asks all processes: 1 and 4 numbers.
SMALL = {("allreduce_", torch.int64): 8 + 32}


def take_step(config: str, scale: str, attention: str, options: Mapping[str, Any]) -> Sharded:
    """Take a step as the first process; return it, its plan, and both models' parameters."""
    start_first(config)
    with Watch() as watch:
        trainer = make_run(Method(), attention, scale, 8, **options)
        sizes = [sizes_of(model) for model in (trainer.model, *trainer.online_teachers)]
        plan = planned(trainer)
        step = one_step(watch, trainer)
    student, teacher = (size.parameters for size in sizes)
    return step, plan, student, teacher


def test_sharded_step_waits_once_and_sends_what_its_weights_say(
    on_fake_cuda: Callable[..., Sharded],
) -> None:
    step, _, student, _ = on_fake_cuda(take_step, "fsdp2", "tiny", "torch_varlen", {})
    check_step(step, "torch_varlen")
    assert step.sent == SMALL | {GATHER: 2 * 2 * student, SCATTER: 4 * student}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "teacher_sharding"),
    [
        ("fsdp2", "torch_varlen", "none"),
        ("fsdp2", "sdpa", "none"),
        ("fsdp2_32xh100", "torch_varlen", "node"),
        ("hsdp_32xh100", "torch_varlen", "none"),
    ],
)
def test_sharded_step_takes_what_the_plan_says(
    config: str, attention: str, teacher_sharding: str, on_fake_cuda: Callable[..., Sharded]
) -> None:
    options = {"teacher_sharding": teacher_sharding}
    step, plan, student, teacher = on_fake_cuda(take_step, config, "full", attention, options)
    check_step(step, attention)
    assert plan == pytest.approx(step.peak, rel=0.03)
    # In each of two micro-batches all weights in 16 bits; gradients in float32, once.
    gathered = student + (teacher if teacher_sharding == "node" else 0)
    expected = SMALL | {GATHER: 2 * 2 * gathered, SCATTER: 4 * student}
    if config == "hsdp_32xh100":
        expected[REDUCE] = 4 * student // 8  # between machines
    assert step.sent == expected
