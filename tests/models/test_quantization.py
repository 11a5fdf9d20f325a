"""Names and JSON for quantized teachers."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from transformers.quantizers.auto import AutoQuantizationConfig

from vocagnolm.models.load import quantization
from vocagnolm.objective import OnlineTeacher
from vocagnolm.token_loss import add_token_losses


def test_quantization_is_a_config_of_transformers() -> None:
    four = AutoQuantizationConfig.from_dict(quantization("nf4", torch.float16))
    assert (four.load_in_4bit, four.bnb_4bit_quant_type) == (True, "nf4")
    assert four.bnb_4bit_compute_dtype == torch.float16
    eight = AutoQuantizationConfig.from_dict(quantization("int8"))
    assert eight.load_in_8bit
    for config in (four, eight):
        assert config.llm_int8_skip_modules is None  # as transformers chooses: the head is one
    given = '{"quant_method": "gptq", "bits": 4}'
    assert quantization(given) == {"quant_method": "gptq", "bits": 4}


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
    OnlineTeacher([model], torch.device("cpu"))
