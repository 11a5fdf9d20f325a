"""The probe from the configuration: how it makes a small model, and which one it probes.

test_probes.py tests which architectures it refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import build

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.models import early_probe
from vocagnolm.models.early_probe import check_kind
from vocagnolm.models.probes import PackingError


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that reach the probe, which accepts them."""
    models: list[Any] = []
    monkeypatch.setattr(early_probe, "check_packing", models.append)
    return models


def llama(**sizes: Any) -> Any:
    return build("llama", **sizes).config


@pytest.mark.parametrize(("layers", "expected"), [(1, 1), (5, 2)])
def test_small_model_has_few_layers_and_tokens(
    layers: int, expected: int, probed: list[Any]
) -> None:
    config = llama(
        vocab_size=2000, intermediate_size=300, num_hidden_layers=layers, pad_token_id=1999
    )
    before = config.to_dict()
    check_kind(config, None)
    assert config.to_dict() == before
    small = probed[0].config
    assert (small.vocab_size, small.intermediate_size) == (512, 128)
    assert small.num_hidden_layers == len(probed[0].model.layers) == expected


def test_small_model_is_no_larger_than_the_model(probed: list[Any]) -> None:
    check_kind(llama(), None)
    assert (probed[0].config.vocab_size, probed[0].config.intermediate_size) == (61, 48)


def test_small_model_has_a_layer_of_each_kind(probed: list[Any]) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    check_kind(build("Gemma3Text", num_hidden_layers=4, layer_types=kinds).config, None)
    assert probed[0].config.layer_types == ["sliding_attention", "full_attention"]
    assert len(probed[0].model.layers) == 2


def test_chunks_of_mamba_are_short(probed: list[Any]) -> None:
    sizes = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
    check_kind(build("FalconH1", **sizes).config, "sdpa")
    assert probed[0].config.mamba_chunk_size == 16


def test_small_model_is_the_same_whatever_was_drawn_before(probed: list[Any]) -> None:
    config = llama(dtype="bfloat16")
    for draws in (0, 5):
        torch.rand(draws)
        before = torch.get_rng_state()
        check_kind(config, "eager")
        assert torch.equal(before, torch.get_rng_state())
    first, second = probed
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert first.config._attn_implementation == "eager"
    assert first.dtype == torch.float32
    assert not first.training
    # Weights are spread, except the scales of norms.
    assert first.lm_head.weight.std().item() == pytest.approx(4 * config.initializer_range, rel=0.1)
    assert torch.equal(first.model.norm.weight, torch.ones(32))


@pytest.mark.parametrize("trust", [False, True])
def test_code_is_run_when_it_is_trusted(trust: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = llama(), []

    def from_config(config: Any, **options: Any) -> None:
        calls.append(options)
        raise ValueError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", from_config)
    check_kind(config, None, trust=trust)
    assert calls == [{"trust_remote_code": trust}]


def test_nothing_is_probed_when_a_cpu_could_not_tell(
    probed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_probe, "_MOST_WEIGHTS", 100)
    check_kind(llama(), None)
    monkeypatch.setattr(early_probe, "_small", probed.append)
    check_kind(llama(), "flash_attention_2")
    assert not probed


@pytest.mark.parametrize(
    "kind",
    [
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        IndexError,
        RuntimeError,
        ImportError,
        NonFiniteLoss,
        AssertionError,
        NotImplementedError,
    ],
)
def test_model_that_cannot_be_probed_is_left_to_the_loaded_one(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any) -> None:
        raise error

    monkeypatch.setattr(early_probe, "check_packing", fail)
    error: Exception = kind("as it is")
    check_kind(llama(), None)
    error = PackingError("documents meet")
    with pytest.raises(PackingError, match="documents meet"):
        check_kind(llama(), None)
