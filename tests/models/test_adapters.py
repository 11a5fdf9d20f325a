"""LoRA adapters around a student: exact losses, what is rejected. Whole runs: test_export.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vocagnolm.models.adapters import adapt, check_adapted, merge_adapters, read_adapters
from vocagnolm.models.probes import check_packing
from vocagnolm.token_loss import add_token_losses
from vocagnolm.training.models import add_adapters
from vocagnolm.training.options import ModelOptions

peft = pytest.importorskip("peft")
VOCABULARY = 300
IDS = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))


def arguments(**changes: Any) -> ModelOptions:
    return ModelOptions(use_peft=True, lora_r=4, lora_alpha=16, **changes)


def set_random(adapted: Any) -> None:
    """Adapters begin as zero; make them do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )


# The model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_and_gradients_equal_those_of_own_logits(
    tied: bool, attached: str, checkpointing: bool, tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(VOCABULARY, tie_word_embeddings=tied).double()
    if attached == "before":
        add_token_losses(model)
    adapted = add_adapters(model, arguments(lora_modules_to_save=["norm"]), seed=0)
    assert add_token_losses(adapted) is adapted
    set_random(adapted)
    if checkpointing:
        adapted.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        adapted.train()
    losses = adapted(input_ids=IDS, labels=IDS, token_losses=True)[:, 1:]
    logits = adapted(input_ids=IDS, use_cache=False).logits
    expected = F.cross_entropy(logits[:, :-1].mT, IDS[:, 1:], reduction="none")
    with adapted.disable_adapter(), torch.no_grad():
        plain = adapted(input_ids=IDS, labels=IDS, token_losses=True)[:, 1:]
    assert (losses - expected).abs().max() < 1e-6  # they are returned in float32
    assert (losses - plain).abs().max() > 1e-2, "the adapters do nothing"
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    weight = torch.rand(expected.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (torch.autograd.grad((weight * x).sum(), trained) for x in (losses, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6 * (1 + b.abs().max())


def test_adapters_are_the_same(tiny_llama: Callable[..., Any]) -> None:
    states = []
    for draws, seed in ((0, 7), (5, 7), (5, 8)):
        torch.rand(draws)
        before = torch.get_rng_state()
        adapted = add_adapters(tiny_llama(VOCABULARY), arguments(), seed)
        assert torch.equal(before, torch.get_rng_state())
        states.append(peft.get_peft_model_state_dict(adapted))
    first = next(name for name in states[0] if "lora_A" in name)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0][first], states[2][first])


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["norm"], ["norm"]),  # PEFT alone would match names without the dot, too
        (["1.input_layernorm", "norm"], ["layers.1.input_layernorm", "norm"]),
        (["input_layernorm"], ["layers.0.input_layernorm", "layers.1.input_layernorm"]),
    ],
)
def test_only_adapters_and_named_layers_are_trained(
    names: list[str], expected: list[str], tiny_llama: Callable[..., Any]
) -> None:
    model = tiny_llama(VOCABULARY)
    model.model.my_norm = torch.nn.RMSNorm(32)
    adapted = add_adapters(model, arguments(lora_modules_to_save=names), seed=0)
    assert {p.dtype for p in adapted.parameters()} == {torch.float32}
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    factors = {name for name in trained if "lora_" in name}
    assert factors
    assert not any("lm_head" in name for name in factors)
    assert trained - factors == {
        f"base_model.model.model.{name}.modules_to_save.default.weight" for name in expected
    }


def test_packing_is_checked_when_the_model_is_adapted(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(VOCABULARY, initializer_range=0.1)  # losses far from uniform
    adapted = add_adapters(model, arguments(), seed=0)
    check_packing(adapted)
    base = model.model
    base.forward = lambda **inputs: type(base).forward(base, **inputs | {"position_ids": None})
    with pytest.raises(ValueError, match="see each other"):
        check_packing(adapted)


def test_layer_that_is_not_there_is_rejected(tiny_llama: Callable[..., Any]) -> None:
    layers = ["q_proj", "q_porj"]
    with pytest.raises(ValueError, match="has no layer q_porj"):
        add_adapters(tiny_llama(VOCABULARY), arguments(lora_target_modules=layers), seed=0)


# Adapters of PEFT, by any trainer


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS, use_cache=False).logits


def lora(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | options
    )


ADAPTERS: dict[str, Any] = {
    "lora": lora(),
    "all-linear": lora(target_modules="all-linear"),
    "pattern": lora(target_modules=r".*layers\.0.*_proj"),
    "dora": lora(use_dora=True),
    "rslora": lora(use_rslora=True),
    "bias": lora(bias="all"),
    "norm": lora(modules_to_save=["norm"]),
    "ia3": peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["o_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "loha": peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
}
HEADS: dict[str, Any] = {
    "head": lora(target_modules=["lm_head"]),
    "saved head": lora(modules_to_save=["lm_head"]),
}
# They are the head's, too, if it shares their weight.
EMBEDDINGS: dict[str, Any] = {
    "embeddings": lora(target_modules=["q_proj", "embed_tokens"]),
    "embeddings by pattern": lora(target_modules=r".*(embed_tokens|k_proj)"),
    "saved embeddings": lora(modules_to_save=["embed_tokens"]),
    "tokens": lora(trainable_token_indices={"embed_tokens": [1, 2]}),
}
ALL = ADAPTERS | HEADS | EMBEDDINGS


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, False) for kind in (*ADAPTERS, *EMBEDDINGS)),
        *((kind, True) for kind in ADAPTERS),
    ],
)
def test_merged_model_that_is_saved_has_the_logits_of_the_adapted_one(
    kind: str, tied: bool, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    base = tiny_llama(VOCABULARY, tie_word_embeddings=tied)
    plain = logits_of(base)
    # PEFT draws some factors from the global generator, and a few draws do next to nothing.
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, ALL[kind])
    check_adapted(adapted)
    set_random(adapted)
    adapted.save_pretrained(tmp_path / "adapters")
    model = tiny_llama(VOCABULARY, tie_word_embeddings=tied)
    merged = merge_adapters(model, *read_adapters(tmp_path / "adapters"))
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(model).from_pretrained(tmp_path / "merged")
    expected = logits_of(adapted)
    assert (expected - plain).abs().max() > 1e-3, "the adapters do nothing"
    torch.testing.assert_close(logits_of(loaded), expected, rtol=1e-4, atol=2e-5)
    assert loaded.config.tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("kind", "tied"),
    [*((kind, False) for kind in HEADS), *((kind, True) for kind in HEADS | EMBEDDINGS)],
)
def test_adapters_of_the_heads_weight_are_rejected(
    kind: str, tied: bool, tiny_llama: Callable[..., Any]
) -> None:
    models = [tiny_llama(VOCABULARY, tie_word_embeddings=tied) for _ in range(3)]
    adapted = peft.get_peft_model(models[2], ALL[kind])
    for reject in (
        lambda: adapt(models[0], ALL[kind], seed=0),
        lambda: merge_adapters(models[1], ALL[kind], {}),
        lambda: check_adapted(adapted),
    ):
        with pytest.raises(ValueError, match=r"the (output head|embeddings).* cannot be adapted"):
            reject()


@pytest.fixture
def saved(tiny_llama: Callable[..., Any], tmp_path: Path) -> Path:
    """Adapters in a directory."""
    adapt(tiny_llama(VOCABULARY), lora(), seed=0).save_pretrained(tmp_path)
    return tmp_path


def test_adapters_of_another_model_are_not_merged(
    saved: Path, tiny_llama: Callable[..., Any]
) -> None:
    config, state = read_adapters(saved)
    name = min(state)
    missing = {other: weight for other, weight in state.items() if other != name}
    for wrong in (missing, state | {name: state[name][:, 1:]}):
        with pytest.raises(ValueError, match="1 of their weights"):
            merge_adapters(tiny_llama(VOCABULARY), config, wrong)


def test_adapters_that_are_damaged_are_rejected(saved: Path) -> None:
    weights = saved / "adapter_model.safetensors"
    for damage in (
        lambda: os.truncate(weights, 99),
        weights.unlink,
        lambda: (saved / "adapter_config.json").write_text('{"peft_type": "NEW"}'),
    ):
        damage()
        with pytest.raises(ValueError, match="cannot be loaded"):
            read_adapters(saved)
