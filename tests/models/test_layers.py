"""Liger's kernels leave token losses as they are, in the student and its teachers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import build, rows
from transformers.integrations import liger

from vocagnolm import PackedCollator, VocAgnoConfig, VocAgnoTrainer
from vocagnolm.token_loss import add_token_losses


@pytest.fixture
def fake_liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package that patches an instance where Liger does: norms, and the forward if asked to."""
    calls: list[dict[str, Any]] = []

    def apply(model: Any, fused_linear_cross_entropy: bool = True, **settings: Any) -> None:
        calls.append({"fused_linear_cross_entropy": fused_linear_cross_entropy, **settings})
        norm = model.model.norm
        norm.forward = type(norm).forward.__get__(norm)
        if fused_linear_cross_entropy:
            model.forward = lambda *args, **kwargs: "logits"

    package = ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    return calls


def test_token_losses_survive_liger(fake_liger: list[dict[str, Any]]) -> None:
    model, batch = add_token_losses(build()), rows()
    expected = model(**batch)
    liger.apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})
    assert "forward" in vars(model.model.norm), "Liger was not applied"
    assert torch.equal(model(**batch), expected)
    assert len(fake_liger) == 1


def test_one_switch_fuses_the_teachers_with_the_same_kernels(
    fake_liger: list[dict[str, Any]], tmp_path: Path
) -> None:
    given = {"rms_norm": True, "rope": False}
    args = VocAgnoConfig(output_dir=str(tmp_path), max_length=8, use_cpu=True)
    args.liger_kernel_config |= given
    models = {"model": build(), "teacher": [build("qwen2"), build("llama")]}
    for is_fused in (False, True):
        args.use_liger_kernel = is_fused
        trainer = VocAgnoTrainer(**models, args=args, data_collator=PackedCollator(8))
        # They are tested, and return losses.
        for teacher in trainer.online_teachers:
            assert ("forward" in vars(teacher.model.norm)) == is_fused
    off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert fake_liger == [off | given] * 2
