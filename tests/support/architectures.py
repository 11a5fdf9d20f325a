"""Tiny models of the real architectures, their gradients, and rows of packed segments for them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.nn import functional as F

from vocagnolm.attention import segments_of
from vocagnolm.token_loss import add_token_losses

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {}),
    "gemma2": ("Gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}),
    "granite": ("Granite", {"logits_scaling": 4.0}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "phi": ("Phi", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "olmo2": ("Olmo2", {}),
}
LENGTHS = ((5, 9, 2), (16,), (1, 7, 6, 1, 1))
SEGMENTS = segments_of(length for row in LENGTHS for length in row)


def build(name: str = "llama", spread: float = 0.3, seed: int = 1, **overrides: Any) -> Any:
    """A tiny model whose weights are large enough for soft caps, scales and biases to matter."""
    family, options = ARCHITECTURES.get(name, (name, {}))
    config = getattr(transformers, family + "Config")(**SIZES | options | overrides)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.eval()


def with_attention(name: str, attention: str, **overrides: Any) -> Any:
    """A tiny model with an attention that takes segments."""
    model = build(name, **overrides)
    model.set_attn_implementation(attention)
    return add_token_losses(model)


def rows(seed: int = 0) -> dict[str, Any]:
    """Packed segments of `LENGTHS`, as arguments of a model."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(LENGTHS), 16), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "token_losses": True}


def labelled_rows(
    rows: int = 2, length: int = 13, ignored: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    return ids, ids.masked_fill(torch.rand(ids.shape, generator=generator) < ignored, -100)


def reference_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Losses from full logits."""
    logits = model(input_ids=ids, use_cache=False).logits
    losses = F.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none", ignore_index=-100)
    return F.pad(losses, (1, 0))


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: Any, expected: Any, relative: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)
        # A bias before a softmax over keys has no gradient but rounding noise.
        noise = gradient.abs().max() < 1e-6 and found[name].abs().max() < 1e-6
        assert noise or error < relative, (name, float(error))
