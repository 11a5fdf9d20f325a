"""Steps of as many processes as the files of `accelerate_configs/` start: waits, messages, memory.

Models and micro-batches are those of test_memory.py. Only rank 0 runs; the other processes do
not exist. DDP is left to arithmetic, as its reducer reads memory: it reduces 4 bytes a parameter
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
from vocagnolm.models.cost import sizes_of

Messages = dict[tuple[str, torch.dtype], int]
Sharded = tuple[Step, float, Messages]


def take_step(config: str, scale: str, attention: str, options: Mapping[str, Any]) -> Sharded:
    """Take a step as the first process; return it, its plan, and what it must send."""
    start_first(config)
    with Watch() as watch:
        trainer = make_run(Method(), attention, scale, 8, **options)
        plan, messages = planned(trainer), expected_messages(trainer, config)
        return one_step(watch, trainer), plan, messages


def expected_messages(trainer: Any, config: str) -> Messages:
    """Bytes of a step of two micro-batches."""
    student, *teachers = [sizes_of(each) for each in (trainer.model, *trainer.online_teachers)]
    gathered = student.parameters
    if trainer.args.teacher_sharding == "node":
        gathered += teachers[0].parameters
    trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
    found = {
        # All weights in each micro-batch, in 16 bits; gradients once, in float32.
        ("_allgather_base_", torch.bfloat16): 2 * 2 * gathered,
        ("_reduce_scatter_base_", torch.float32): 4 * student.trained,
        # The divisor, four numbers of the guard, and a norm for each weight.
        ("allreduce_", torch.float32): 4,
        ("allreduce_", torch.int64): 4 * 8,
        ("all_reduce", torch.float32): 4 * len(trained),
    }
    if config == "hsdp_32xh100":
        found["allreduce_", torch.float32] += 4 * student.trained // 8  # between machines
    return found


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"lora": True}, marks=pytest.mark.slow)], ids=["whole", "LoRA"]
)
def test_sharded_step_waits_once_and_sends_what_its_weights_say(
    options: dict[str, Any], on_fake_cuda: Callable[..., Sharded]
) -> None:
    step, _, messages = on_fake_cuda(take_step, "fsdp2", "tiny", "torch_varlen", options)
    check_step(step, "torch_varlen")
    assert step.sent == messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "teacher_sharding"),
    [
        ("fsdp2", "torch_varlen", "none"),
        ("fsdp2_32xh100", "torch_varlen", "node"),
        ("hsdp_32xh100", "torch_varlen", "none"),
    ],
)
def test_sharded_step_takes_what_the_plan_says(
    config: str, attention: str, teacher_sharding: str, on_fake_cuda: Callable[..., Sharded]
) -> None:
    options = {"teacher_sharding": teacher_sharding}
    step, plan, messages = on_fake_cuda(take_step, config, "full", attention, options)
    check_step(step, attention)
    assert plan == pytest.approx(step.peak, rel=0.03)
    assert step.sent == messages
