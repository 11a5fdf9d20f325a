"""An optimizer step of every method, and by each attention: no mixed devices, and one wait.

Two micro-batches in bfloat16, clipping, the guard, and the fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import pytest
import torch
from fake_run import Step, check_step, run
from methods_world import CHUNK_SETTINGS, VARIANTS
from packaging.version import Version

from vocagnolm.method import Method
from vocagnolm.objective import Objective

METHODS: dict[str, dict[str, Any]] = {
    "cpt": {"method": "cpt"},
    "random": {"method": "random"},
    "warmup": {"top_k_warmup_steps": 1},
    **VARIANTS,
    "kld": {"method": "kld"},
    "kld forward": {"method": "kld", "kld_direction": "forward"},
    "uld": {"method": "uld"},
    "uld last": {"method": "uld", "uld_pairing": "last"},
    "rho1": {"method": "rho1"},
    "rho1 entropy": {"method": "rho1", "rho1_score": "loss_and_entropy"},
    "rho1 accept": {"method": "rho1", "selection": "accept"},
    **{name: {"method": "chunk", **more} for name, more in CHUNK_SETTINGS.items()},
    **{how: {"teacher_reduction": how} for how in ("several mean", "several min", "several max")},
    "several weighted": {"teacher_reduction": "weighted", "teacher_weights": [1.0, 3.0]},
}
WAYS: dict[str, dict[str, Any]] = {
    "stored": {"stored": True},
    "several stored": {"stored": True, "teachers": 2},
    "LoRA": {"lora": True},
    "checkpointing": {"gradient_checkpointing": True},
    "conversations": {"conversations": True},
}
# Methods that make a step in `make test` already.
QUICK = ("cpt", "vocagnolm", "kld", "uld")
VARLEN = "torch_varlen"


def step_of(settings: dict[str, Any], attention: str, options: dict[str, Any]) -> Step:
    """Take a step, in the process that has the device."""
    how = settings.get("teacher_reduction", "")
    if how:
        settings = {**settings, "teacher_reduction": how.removeprefix("several ")}
        options = {**options, "teachers": 2}
    return run(Method(**settings), attention, **options)


def cases(names: Iterable[str]) -> list[Any]:
    """Mark all names as slow, except the quick ones."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[] if name in QUICK else slow) for name in names]


@pytest.mark.parametrize("name", cases(METHODS))
def test_step_mixes_no_devices_and_waits_once(name: str, on_fake_cuda: Callable[..., Step]) -> None:
    splits = METHODS[name].get("method") in ("kld", "uld")
    if splits and Version(metadata.version("torch")) < Version("2.13"):
        pytest.skip("fakes of PyTorch 2.11 cannot split what has no rows")
    check_step(on_fake_cuda(step_of, METHODS[name], VARLEN, {}, keep=True), VARLEN)


@pytest.mark.parametrize("way", cases(WAYS))
def test_ways_of_training_wait_once(way: str, on_fake_cuda: Callable[..., Step]) -> None:
    check_step(on_fake_cuda(step_of, {}, VARLEN, WAYS[way], keep=True), VARLEN)


# Attention is inside models. Methods see losses; kld and uld read the states of both models.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vocagnolm", "kld", "uld"])
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_other_attentions_wait_once(
    name: str, attention: str, on_fake_cuda: Callable[..., Step]
) -> None:
    options = {"conversations": name == "vocagnolm", "gradient_checkpointing": name == "uld"}
    step = on_fake_cuda(step_of, METHODS[name], attention, options, keep=True)
    check_step(step, attention)


def faulty_step() -> Step:
    """Take a step that does what it should not while it selects tokens."""
    own = Objective.select

    def select(*args: Any, **options: Any) -> Any:
        found = own(*args, **options)
        weight = found.weight_BS
        weight.sum().item(), weight.nonzero(), weight[weight > 0]
        torch.ones(3).to(weight.device)
        torch.tensor(3, device=weight.device)
        weight.sum() + torch.tensor(1.0)
        return found

    Objective.select = select  # type: ignore[method-assign]
    return run(Method())


def test_planted_faults_are_found(on_fake_cuda: Callable[..., Step]) -> None:
    step = on_fake_cuda(faulty_step)
    here = {"micro-batch"}
    waits = {seen.what: count for seen, count in step.waits.items() if seen.phase in here}
    twice = {"item": 2, "nonzero": 2, "boolean mask": 2, "copy to the device": 4}
    assert waits == twice
    assert {(seen.phase, seen.what) for seen in step.mixed} == {("micro-batch", "add")}
    assert ("micro-batch", "ones") in {(seen.phase, seen.what) for seen in step.cpu}
    with pytest.raises(AssertionError):
        check_step(step, VARLEN)
