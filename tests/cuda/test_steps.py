"""An optimizer step of every method, and by each attention: no mixed devices, one wait, its FLOPs.

Two micro-batches in bfloat16, clipping, the guard, and the fused AdamW.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import pytest
import torch
from fake_cuda import Watch
from fake_run import CUDA, Step, check_step, make_run, one_step
from methods_world import METHODS, VARIANTS
from packaging.version import Version
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import count_tokens, make_config, make_model
from vocagnolm.collator import PackedCollator
from vocagnolm.method import Method
from vocagnolm.models.cost import model_work
from vocagnolm.store.windows import HFScorer, Window

STEPS: dict[str, dict[str, Any]] = {
    "cpt": {"method": "cpt"},
    "random": {"method": "random"},
    "warmup": {"top_k_warmup_steps": 1},
    "rho1 accept": {"method": "rho1", "selection": "accept"},
    **VARIANTS,
    **METHODS,
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
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)


def step_of(settings: dict[str, Any], attention: str, options: dict[str, Any]) -> Step:
    """Take a step, in the process that has the device."""
    if "teacher_reduction" in settings:
        options = {**options, "teachers": 2}
    with Watch() as watch:
        return one_step(watch, make_run(Method(**settings), attention, **options))


def cases(names: Iterable[str]) -> list[Any]:
    """Mark all names as slow, except the quick ones."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[] if name in QUICK else slow) for name in names]


@pytest.mark.parametrize("name", cases(STEPS))
def test_step_mixes_no_devices_and_waits_once(name: str, on_fake_cuda: Callable[..., Step]) -> None:
    splits = STEPS[name].get("method") in ("kld", "uld")
    if splits and Version(metadata.version("torch")) < Version("2.13"):
        pytest.skip("fakes of PyTorch 2.11 cannot split what has no rows")
    check_step(on_fake_cuda(step_of, STEPS[name], VARLEN, {}, keep=True), VARLEN)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_training_wait_once(way: str, on_fake_cuda: Callable[..., Step]) -> None:
    check_step(on_fake_cuda(step_of, {}, VARLEN, WAYS[way], keep=True), VARLEN)


# Attention is inside models. Methods see losses; kld and uld read the states of both models.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["vocagnolm", "kld", "uld"])
def test_sdpa_waits_once(name: str, on_fake_cuda: Callable[..., Step]) -> None:
    options = {"conversations": name == "vocagnolm", "gradient_checkpointing": name == "uld"}
    check_step(on_fake_cuda(step_of, STEPS[name], "sdpa", options, keep=True), "sdpa")


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


def test_flops_of_the_logged_mfu_are_those_that_torch_counts(
    on_fake_cuda: Callable[..., tuple[int, float]],
) -> None:
    counted, computed = on_fake_cuda(counted_and_computed)
    assert counted == computed


def scored() -> tuple[dict[Any, int], ...]:
    """Score windows, up to where their losses are read; return the waits and mixed devices."""
    with Watch() as watch:
        config = make_config("teacher", "tiny")
        scorer = HFScorer(make_model(config, CUDA, torch.bfloat16, VARLEN), 64)
        watch.clear()
        windows = [Window(number, list(range(20)), 10 + number) for number in range(3)]
        parts, loss_N = scorer._batch_losses(windows)
        assert loss_N.is_cuda
        assert [loss_N[part].shape[0] for part in parts] == [10, 11, 12]
    return dict(watch.waits), dict(watch.mixed)


def test_scoring_does_not_wait(on_fake_cuda: Callable[..., tuple[dict[Any, int], ...]]) -> None:
    assert on_fake_cuda(scored) == ({}, {})


def small_faults() -> tuple[dict[str, int], ...]:
    """Do everything that waits, and much that does not; return the kinds of records."""
    with Watch() as watch:
        x, host = torch.ones(4, 3, device="cuda"), torch.ones(4, 3)
        row, flat = x[0], x.flatten()
        watch.clear()
        float(x.sum()), bool((x > 0).all()), int(row[0])
        x.tolist()
        assert flat.nonzero().shape == (12, 1)
        assert x[x > 0].shape == (12,)
        assert x[x[:, 0] > 0].shape == (4, 3)
        x[x > 0] = row[0]  # fills
        x[x[:, 0] > 0] = x
        x.cpu(), host.cuda(), torch.tensor(1, device="cuda"), x.copy_(host)
        host.pin_memory(), host.cuda()
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
        host.cuda(non_blocking=True), x.copy_(host, non_blocking=True)
        x.to("cpu", non_blocking=True)
        x.masked_fill_(x > 0, 0.0).where(x > 0, 1.0).to(torch.bfloat16).clone()
        x.sum() + host.sum(), x * 2.0
    records = (watch.waits, watch.copies, watch.mixed, watch.cpu)
    kinds: Any = [Counter[str]() for _ in records]
    for found, seen in zip(kinds, records, strict=True):
        for key, count in seen.items():
            found[key.what] += count
    return tuple(dict(found) for found in kinds)


def test_watch_tells_waits_copies_and_mixes_apart(
    on_fake_cuda: Callable[..., tuple[dict[str, int], ...]],
) -> None:
    waits, copies, mixed, cpu = on_fake_cuda(small_faults)
    assert waits == {
        "item": 3,
        "tolist": 1,
        "nonzero": 1,
        "boolean mask": 3,
        "copy to the host": 1,
        "copy to the device": 4,
        "synchronize": 2,
    }
    assert copies == {"copy to the device": 2, "copy to the host": 1}
    assert mixed == {"add": 1}
    assert cpu == {"lift_fresh": 1, "sum": 1}
