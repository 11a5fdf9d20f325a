"""Names and JSON for quantized teachers, and the refusals."""

from __future__ import annotations

import importlib

import pytest
import torch
from architectures import build
from transformers.quantizers.auto import AutoQuantizationConfig

from vocagnolm.models import quantization
from vocagnolm.teacher import ResidentTeacher
from vocagnolm.token_loss import add_token_losses


@pytest.fixture
def any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("any_package")
def test_quantization_is_a_config_of_transformers() -> None:
    four = AutoQuantizationConfig.from_dict(quantization.quantization("nf4", torch.float16))
    assert (four.load_in_4bit, four.bnb_4bit_quant_type) == (True, "nf4")
    assert four.bnb_4bit_compute_dtype == torch.float16
    eight = AutoQuantizationConfig.from_dict(quantization.quantization("int8"))
    assert eight.load_in_8bit
    for config in (four, eight):
        assert config.llm_int8_skip_modules is None  # as transformers chooses: the head is one
    given = '{"quant_method": "gptq", "bits": 4}'
    assert quantization.quantization(given) == {"quant_method": "gptq", "bits": 4}


@pytest.mark.usefixtures("any_package")
@pytest.mark.parametrize("capability", [None, (8, 0)])
def test_fp8_without_a_gpu_for_it_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(ValueError, match=r"compute capability 8\.9: H100"):
        quantization.quantization("fp8")


@pytest.mark.parametrize("name", quantization.QUANTIZATIONS)
def test_missing_package_of_quantization_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=f"{name} needs .*pip install {quantization.QUANTIZATIONS[name]}"
    ):
        quantization.quantization(name)


@pytest.mark.parametrize("text", ["fp7", "[]", "{}", "4"])
def test_unknown_quantization_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"--teacher_quantization \(fp8, nf4, int8 or JSON\)"):
        quantization.quantization(text)


def test_quantized_head_is_rejected() -> None:
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
