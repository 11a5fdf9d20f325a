"""The plan of a run beside the most that its tensors take, at the paper's sizes.

TinyLlama 1.1B with AdamW, and Qwen2.5-Math-7B in 16 bits; two micro-batches of 8 rows of 2,048
tokens. Several GPUs: test_sharded.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_cuda import Watch
from fake_run import make_run, one_step

from vocagnolm.method import Method
from vocagnolm.run.plan import Layout, sizes_of, student_memory, teacher_memory

GIB = 2**30


def peak_and_plan(method: str, attention: str, options: dict[str, Any]) -> tuple[float, float]:
    """Bytes that a step takes at its fullest, and what is planned for it."""
    with Watch() as watch:
        trainer = make_run(Method(method), attention, "full", 8, **options)
        layout = Layout(
            precision="mixed",
            recomputes="gradient_checkpointing" in options,
            accumulates=True,
            mask=trainer.data_collator.max_length if attention == "sdpa" else 0,
        )
        tokens = 8 * trainer.data_collator.max_length
        plan = sum(student_memory(sizes_of(trainer.model), layout, tokens).values())
        for teacher in trainer.online_teachers:
            plan += sum(teacher_memory(sizes_of(teacher), 2).values())
        return one_step(watch, trainer).peak, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "attention", "options"),
    [
        ("vocagnolm", "torch_varlen", {}),
        ("vocagnolm", "sdpa", {}),
        ("vocagnolm", "torch_varlen", {"gradient_checkpointing": True}),
        ("cpt", "torch_varlen", {"lora": True}),
    ],
)
def test_plan_is_within_three_per_cent_of_what_tensors_take(
    method: str,
    attention: str,
    options: dict[str, Any],
    on_fake_cuda: Callable[..., tuple[float, float]],
) -> None:
    peak, plan = on_fake_cuda(peak_and_plan, method, attention, options)
    assert plan == pytest.approx(peak, rel=0.03), f"{peak / GIB:.2f} GiB, planned {plan / GIB:.2f}"
