"""A run goes on where its checkpoint ends, and skips a step whose gradient is a NaN.

A GPU adds in any order, so two equal runs differ a little. The resumed run may differ by four times
as much, or by 5 % of the distance that the weights moved. If random numbers, the optimizer or the
data start afresh, it is 17 to 59 % off (seen on a CPU).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_run import STEPS, distance, train
from transformers import TrainerCallback

from vocagnolm.method import Method

pytestmark = pytest.mark.gpu

SCATTER, OF_THE_WAY = 4, 0.05


def test_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, device: torch.device
) -> None:
    # Dropout uses the device's random numbers. Discrete choices would make equal runs
    # differ: a selection, and with Adam's usual epsilon the signs of tiny gradients.
    options = {
        "dropout": 0.1,
        "method": Method(top_k=1.0),
        "adam_epsilon": 1e-3,
    }
    whole, again = (train(tmp_path / name, **options) for name in ("whole", "again"))
    limit = max(SCATTER * distance(again.weights, whole.weights), OF_THE_WAY * whole.way)
    if device.type == "cpu":
        limit = 0.0
    checkpoint = tmp_path / "whole" / f"checkpoint-{STEPS // 2}"
    resumed = train(tmp_path / "resumed", checkpoint, **options)
    assert distance(resumed.weights, whole.weights) <= limit < whole.way / 5
    for entry, expected in zip(resumed.log, whole.log, strict=True):
        assert entry == pytest.approx(expected, rel=OF_THE_WAY if limit else 0)


class Spoiler(TrainerCallback):
    """Puts a NaN into one gradient of the third step, before the guard looks at it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            next(kwargs["model"].parameters()).grad[0, 0] = torch.nan


def test_step_with_a_nan_is_skipped(tmp_path: Path) -> None:
    weights, log, _ = train(tmp_path, callbacks=[Spoiler()])
    assert [entry["step"] for entry in log if entry.get("skipped_steps")] == [3]
    assert all(weight.isfinite().all() for weight in weights.values())
