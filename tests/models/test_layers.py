"""Compiled layers and Liger's kernels: same numbers, and the refusals."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import assert_same_gradients, build, gradients
from packed_rows import SEGMENTS, rows
from segment_attention import with_attention, with_flash
from transformers.integrations import liger

from vocagnolm.models import layers
from vocagnolm.models.probes import check_packing
from vocagnolm.row_segments import segments_of
from vocagnolm.token_loss import add_token_losses

# Inductor takes a minute; its numbers are those of the backend that users get.
BACKEND = "inductor" if os.environ.get("VOCAGNOLM_INDUCTOR") else "aot_eager"


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Any:
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_stay_when_layers_are_compiled(checkpointing: bool) -> None:
    batch, weights = rows(), torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for is_compiled in (False, True):
        model = add_token_losses(build())
        check_packing(model)
        names = list(model.state_dict())
        if is_compiled:
            assert layers.compile_layers(model, backend=BACKEND) == 2
            assert list(model.state_dict()) == names
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        losses = model(**batch, segments=SEGMENTS)
        found.append((losses.detach(), gradients(model, (losses * weights).sum())))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-5)
    assert_same_gradients(found[1][1], found[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_layers_share_their_graphs(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    model = with_attention("llama", "sdpa", num_hidden_layers=12, spread=0.1)
    if attention == "flash_attention_2":
        model = with_flash(monkeypatch, num_hidden_layers=12, spread=0.1).bfloat16()
    layers.compile_layers(model, backend=counting)  # type: ignore[arg-type]
    ids = rows()["input_ids"]
    with torch.no_grad():
        for length in (16, 15, 14, 13):
            cut = {name: value[:, :length] for name, value in (("input_ids", ids), ("labels", ids))}
            positions = torch.arange(length).expand(len(ids), -1)
            segments = segments_of([length] * len(ids))
            model(**cut, position_ids=positions, segments=segments, token_losses=True)
    assert len(graphs) == 2  # for the first length, and for any


def test_all_layers_stay_compiled() -> None:
    assert torch._dynamo.config.recompile_limit < layers._GRAPHS_OF_A_LAYER
    layers.compile_layers(build(), backend="eager")
    assert torch._dynamo.config.recompile_limit == layers._GRAPHS_OF_A_LAYER


def test_compiling_without_named_layers_is_rejected() -> None:
    model = build()
    model._no_split_modules = None
    with pytest.raises(ValueError, match=r"names no decoder layers .*--compile_layers"):
        layers.compile_layers(model)


# Liger


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
    for module in (liger, layers):
        monkeypatch.setattr(module, "is_liger_kernel_available", lambda: True)
    return calls


@pytest.mark.parametrize("given", [None, {}, '{"rope": false}', {"cross_entropy": False}])
def test_token_losses_survive_liger(fake_liger: list[dict[str, Any]], given: Any) -> None:
    model, batch = add_token_losses(build()), rows()
    expected = model(**batch)
    liger.apply_liger_kernel(model, layers.liger_settings(given))
    assert "forward" in vars(model.model.norm), "Liger was not applied"
    assert torch.equal(model(**batch), expected)
    (settings,) = fake_liger
    assert settings["fused_linear_cross_entropy"] is settings["cross_entropy"] is False
    assert ("rope" in settings) == (given == '{"rope": false}')


def test_liger_leaves_a_teacher_of_the_family_alone() -> None:
    llama, qwen = build().config, build("qwen2").config
    given = {"rms_norm": True, "rope": True}
    assert layers.leave_teachers_alone(given, llama, [qwen]) == given
    assert layers.leave_teachers_alone({}, llama, []) == {}
    assert layers.leave_teachers_alone({}, llama, [qwen, llama]) == {"rope": False}
    with pytest.raises(ValueError, match="rope would reach the teacher, a llama model as the stud"):
        layers.leave_teachers_alone(given, llama, [llama])


def test_liger_would_replace_the_losses_when_left_alone(fake_liger: list[dict[str, Any]]) -> None:
    model = add_token_losses(build())
    liger.apply_liger_kernel(model, None)
    assert model(**rows()) == "logits"


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "cross_entropy"])
@pytest.mark.usefixtures("fake_liger")
def test_liger_loss_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} would replace the weighted loss: leave it out"):
        layers.liger_settings({"rope": True, name: True})


def test_liger_is_refused_when_it_is_not_there() -> None:
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        layers.liger_settings(None)
