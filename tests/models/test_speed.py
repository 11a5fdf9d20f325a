"""The knobs for speed: what they change, and what they refuse."""

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
from transformers.integrations import liger
from transformers.quantizers.auto import AutoQuantizationConfig

from vocagnolm.models import speed
from vocagnolm.models.probes import check_packing
from vocagnolm.teacher import ResidentTeacher
from vocagnolm.token_loss import add_token_losses

# Inductor takes a minute; its numbers are those of the backend that users get.
BACKEND = "inductor" if os.environ.get("VOCAGNOLM_INDUCTOR") else "aot_eager"


# Compiled layers


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests() -> Any:
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_stay_when_layers_are_compiled(checkpointing: bool) -> None:
    batch, weights = rows(), torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    found = []
    for is_compiled in (False, True):
        model = add_token_losses(build())
        check_packing(model)
        names = list(model.state_dict())
        if is_compiled:
            assert speed.compile_layers(model, backend=BACKEND) == 2
            assert list(model.state_dict()) == names
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        losses = model(**batch, segments=SEGMENTS)
        found.append((losses.detach(), gradients(model, (losses * weights).sum())))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-5)
    assert_same_gradients(found[1][1], found[0][1])


def test_layers_share_their_graphs_when_a_model_is_deep_and_batches_differ() -> None:
    graphs: list[Any] = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    model = add_token_losses(build(num_hidden_layers=12, spread=0.1))
    speed.compile_layers(model, backend=counting)  # type: ignore[arg-type]
    ids = rows()["input_ids"]
    with torch.no_grad():
        for length in (16, 15, 14, 13):
            model(input_ids=ids[:, :length], labels=ids[:, :length], token_losses=True)
    assert len(graphs) == 2  # for the first length, and for any


def test_all_layers_stay_compiled_when_student_and_teacher_are_of_one_kind() -> None:
    assert torch._dynamo.config.recompile_limit < speed._GRAPHS_OF_A_LAYER
    speed.compile_layers(build(), backend="eager")
    assert torch._dynamo.config.recompile_limit == speed._GRAPHS_OF_A_LAYER


def test_compiling_is_refused_when_a_model_names_no_layers() -> None:
    model = build()
    model._no_split_modules = None
    with pytest.raises(ValueError, match=r"names no decoder layers .*--compile_layers"):
        speed.compile_layers(model)


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
    for module in (liger, speed):
        monkeypatch.setattr(module, "is_liger_kernel_available", lambda: True)
    return calls


@pytest.mark.parametrize("given", [None, {}, '{"rope": false}', {"cross_entropy": False}])
def test_token_losses_survive_liger_when_its_settings_are_ours(
    fake_liger: list[dict[str, Any]], given: Any
) -> None:
    model, batch = add_token_losses(build()), rows()
    expected = model(**batch)
    liger.apply_liger_kernel(model, speed.liger_settings(given))
    assert "forward" in vars(model.model.norm), "Liger was not applied"
    assert torch.equal(model(**batch), expected)
    (settings,) = fake_liger
    assert settings["fused_linear_cross_entropy"] is settings["cross_entropy"] is False
    assert ("rope" in settings) == (given == '{"rope": false}')


def test_liger_would_replace_the_losses_when_left_alone(fake_liger: list[dict[str, Any]]) -> None:
    model = add_token_losses(build())
    liger.apply_liger_kernel(model, None)
    assert model(**rows()) == "logits"


@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "cross_entropy"])
@pytest.mark.usefixtures("fake_liger")
def test_liger_is_refused_when_it_is_to_make_the_loss(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} would replace the weighted loss: leave it out"):
        speed.liger_settings({"rope": True, name: True})


def test_liger_is_refused_when_it_is_not_there() -> None:
    if importlib.util.find_spec("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        speed.liger_settings(None)


# Quantization


@pytest.fixture
def any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("any_package")
def test_quantization_is_a_config_of_transformers_when_it_has_a_name() -> None:
    four = AutoQuantizationConfig.from_dict(speed.quantization("nf4", torch.float16))
    assert (four.load_in_4bit, four.bnb_4bit_quant_type) == (True, "nf4")
    assert four.bnb_4bit_compute_dtype == torch.float16
    eight = AutoQuantizationConfig.from_dict(speed.quantization("int8"))
    assert eight.load_in_8bit
    for config in (four, eight):
        assert config.llm_int8_skip_modules is None  # as transformers chooses: the head is one
    given = '{"quant_method": "gptq", "bits": 4}'
    assert speed.quantization(given) == {"quant_method": "gptq", "bits": 4}


@pytest.mark.usefixtures("any_package")
@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_fp8_is_refused_when_no_gpu_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=r"compute capability 8\.9: H100"):
        speed.quantization("fp8")


@pytest.mark.parametrize("name", speed.QUANTIZATIONS)
def test_quantization_is_refused_when_its_package_is_not_there(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"{name} needs .*pip install {speed.QUANTIZATIONS[name]}"):
        speed.quantization(name)


@pytest.mark.parametrize("text", ["fp7", "[]", "{}", "4"])
def test_quantization_is_refused_when_it_is_neither_a_name_nor_a_config(text: str) -> None:
    with pytest.raises(ValueError, match=r"--teacher_quantization \(fp8, nf4, int8 or JSON\)"):
        speed.quantization(text)


def test_a_teacher_is_refused_when_its_head_is_quantized() -> None:
    model = build()
    model.lm_head.weight = torch.nn.Parameter(
        torch.zeros(61, 32, dtype=torch.int8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"output embeddings are quantized .*torch\.int8"):
        add_token_losses(model)


def test_a_quantized_teacher_stays_where_it_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    model.is_quantized = True
    monkeypatch.setattr(model, "to", lambda device: pytest.fail("moved"))
    ResidentTeacher([model], torch.device("cpu"))
