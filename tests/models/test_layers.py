"""Liger's kernels in the student change neither token losses nor the teacher."""

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


def test_liger_leaves_a_teacher_of_the_family_alone(tmp_path: Path) -> None:
    given = {"rms_norm": True, "rope": True}
    for teachers, rope in ((["qwen2"], True), (["qwen2", "llama"], False)):
        args = VocAgnoConfig(output_dir=str(tmp_path), max_length=8, use_cpu=True)
        args.use_liger_kernel, args.liger_kernel_config = True, given
        models = {"model": build(), "teacher": [build(name) for name in teachers]}
        trainer = VocAgnoTrainer(**models, args=args, data_collator=PackedCollator(8))
        assert trainer.args.liger_kernel_config == given | {"rope": rope}
        assert args.liger_kernel_config == given
