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
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    losses = adapted(input_ids=ids, labels=ids, token_losses=True)[:, 1:]
    logits = adapted(input_ids=ids, use_cache=False).logits
    expected = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    with adapted.disable_adapter(), torch.no_grad():
        plain = adapted(input_ids=ids, labels=ids, token_losses=True)[:, 1:]
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


def test_only_adapters_are_trained_and_in_float32(tiny_llama: Callable[..., Any]) -> None:
    adapted = add_adapters(tiny_llama(VOCABULARY), arguments(), seed=0)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name and "lm_head" not in name for name in trained)
    assert {p.dtype for p in adapted.parameters()} == {torch.float32}


def test_only_named_layers_are_trained_whole(tiny_llama: Callable[..., Any]) -> None:
    norms = [
        f"layers.{n}.{part}_layernorm" for n in range(2) for part in ("input", "post_attention")
    ]
    for names, expected in (
        (["norm"], ["norm"]),  # PEFT alone would match names without the dot, too
        (["1.input_layernorm", "norm"], ["layers.1.input_layernorm", "norm"]),
        (["input_layernorm"], ["layers.0.input_layernorm", "layers.1.input_layernorm"]),
        ([name.rpartition(".")[2] for name in norms], norms),
    ):
        model = tiny_llama(VOCABULARY)
        model.model.my_norm = torch.nn.RMSNorm(32)
        adapted = add_adapters(model, arguments(lora_modules_to_save=names), seed=0)
        trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
        whole = {name for name in trained if "lora_" not in name}
        assert whole == {
            f"base_model.model.model.{name}.modules_to_save.default.weight" for name in expected
        }


def test_packing_is_checked_when_the_model_is_adapted(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(VOCABULARY)
    adapted = add_adapters(model, arguments(), seed=0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.mul_(5)  # losses far from uniform
    check_packing(adapted)
    base = model.model
    base.forward = lambda **inputs: type(base).forward(base, **inputs | {"position_ids": None})
    with pytest.raises(ValueError, match="lets packed documents see each other"):
        check_packing(adapted)


def test_layer_that_is_not_there_is_rejected(tiny_llama: Callable[..., Any]) -> None:
    layers = ["q_proj", "q_porj"]
    with pytest.raises(ValueError, match="has no layer q_porj"):
        add_adapters(tiny_llama(VOCABULARY), arguments(lora_target_modules=layers), seed=0)


# Adapters of PEFT, as Python gives them


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


CONFIGS: list[dict[str, Any]] = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": r".*layers\.0.*_proj"},
    {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": r".*(embed_tokens|k_proj)"},
    {"target_modules": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2]}},
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_adapters_that_are_taken_merge_into_the_same_model(
    options: dict[str, Any], tied: bool, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_llama(VOCABULARY, tie_word_embeddings=tied)
    text = str(options)
    is_rejected = "lm_head" in text or (tied and "embed_tokens" in text)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options)
    if is_rejected:
        with pytest.raises(ValueError, match=r"the (output head|embeddings)"):
            adapt(model, config, seed=0)
        # They are rejected, too, if they are put around the model before.
        adapted = peft.get_peft_model(tiny_llama(VOCABULARY, tie_word_embeddings=tied), config)
        with pytest.raises(ValueError, match=r"the (output head|embeddings)"):
            check_adapted(adapted)
        # Merging them would change the weight of both.
        model, state = tiny_llama(VOCABULARY, tie_word_embeddings=tied), {}
        with pytest.raises(ValueError, match="cannot be adapted"):
            merge_adapters(model, config, state)
        return
    adapted = adapt(model, config, seed=0)
    set_random(adapted)
    ids = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(2))
    expected = logits_of(adapted.eval(), ids)
    adapted.merge_and_unload().save_pretrained(tmp_path)
    merged = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(logits_of(merged.eval(), ids), expected, rtol=1e-4, atol=1e-4)


# Adapters that are merged into their model, whoever trained them


def lora(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]} | options
    )


MERGED: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "rslora": lambda: lora(use_rslora=True),
    "bias": lambda: lora(bias="all"),
    "norm": lambda: lora(modules_to_save=["norm"]),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["o_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    ),
    "loha": lambda: peft.LoHaConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", MERGED)
def test_merged_model_that_is_saved_has_the_logits_of_the_adapted_one(
    kind: str, tied: bool, tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    base, ids = tiny_llama(VOCABULARY, tie_word_embeddings=tied), torch.arange(20)[None]
    plain = logits_of(base, ids)
    # PEFT draws some factors from the global generator, and a few draws do next to nothing.
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, MERGED[kind]())
    set_random(adapted)
    adapted.save_pretrained(tmp_path / "adapters")
    model = tiny_llama(VOCABULARY, tie_word_embeddings=tied)
    merged = merge_adapters(model, *read_adapters(tmp_path / "adapters"))
    merged.save_pretrained(tmp_path / "merged")
    loaded = type(model).from_pretrained(tmp_path / "merged")
    expected = logits_of(adapted.eval(), ids)
    assert (expected - plain).abs().max() > 1e-3, "the adapters do nothing"
    torch.testing.assert_close(logits_of(loaded.eval(), ids), expected, rtol=1e-4, atol=2e-5)
    assert loaded.config.tie_word_embeddings is tied


@pytest.fixture
def saved(tiny_llama: Callable[..., Any], tmp_path: Path) -> Path:
    """Adapters in a directory."""
    adapt(tiny_llama(VOCABULARY), lora(), seed=0).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_adapters_of_another_model_are_not_merged(
    change: str, saved: Path, tiny_llama: Callable[..., Any]
) -> None:
    config, state = read_adapters(saved)
    name = min(state)
    if change == "missing":
        del state[name]
    else:
        state[name] = state[name][:, 1:]
    with pytest.raises(ValueError, match="1 of their weights"):
        merge_adapters(tiny_llama(VOCABULARY), config, state)


def test_adapters_that_are_damaged_are_rejected(saved: Path) -> None:
    os.truncate(saved / "adapter_model.safetensors", 99)
    with pytest.raises(ValueError, match="cannot be loaded"):
        read_adapters(saved)
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be loaded"):
        read_adapters(saved)
    (saved / "adapter_config.json").write_text('{"peft_type": "NEW"}')
    with pytest.raises(ValueError, match="cannot be loaded"):
        read_adapters(saved)
