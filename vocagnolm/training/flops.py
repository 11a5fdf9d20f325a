"""What MFU is made of: FLOPs of a decoder, counted from its linear layers, and the GPU's peak."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

# Dense bfloat16 TFLOP/s with sums in float32, by words of the name that CUDA gives a device; from
# NVIDIA's data sheets (half of "with sparsity") and, for GeForce, its Ada and Ampere white papers.
_PEAK_TFLOPS = {
    ("B200",): 2250.0,
    ("H200",): 989.4,
    ("H200", "NVL"): 835.5,
    ("GH200",): 989.4,
    ("H100", "HBM3"): 989.4,  # the SXM module
    ("H100", "PCIE"): 756.5,
    ("H100", "NVL"): 835.5,
    ("A100",): 312.0,
    ("L40S",): 362.0,
    ("L4",): 121.0,
    ("A10",): 125.0,
    ("4090",): 165.2,
    ("3090",): 71.0,
}
_OTHER_CHIPS = {"LAPTOP", "MIG", "TI", "D"}  # fewer or slower units under the same name


def peak_tflops(device_name: str) -> float | None:
    """Peak of a GPU in dense bfloat16, in TFLOP/s, or None where the table has none.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 PCIe")
    (989.4, 756.5)
    >>> peak_tflops("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    known = [name for name in _PEAK_TFLOPS if words.issuperset(name)]
    if not known or words & _OTHER_CHIPS:
        return None
    return _PEAK_TFLOPS[max(known, key=len)]


@dataclass(frozen=True)
class ModelWork:
    """What tokens cost a decoder, from which MFU follows: model FLOPs / (seconds x peak FLOP/s).

    Only matrix products count, two FLOPs for each multiplication with its addition, and only what
    the losses need: no padding, no recomputation, attention to the keys that a token may see. So
    with activation checkpointing, where the hardware does 4 forward passes' worth for every 3,
    the hardware's utilisation is up to 4/3 of the MFU.

    Attributes:
        body: weights of all linear layers but the output head; the embedding is a look-up.
        head: weights of the output head.
        trained_body, trained_head: those of them that get a gradient.
        attention: layers x heads x head dimension, the multiplications of Q K^T for one key; A V
            takes as many.
    """

    body: int
    head: int
    trained_body: int
    trained_head: int
    attention: int

    def forward_flops(self, tokens: float, keys: float, head_tokens: float) -> float:
        """FLOPs of a forward pass.

        Args:
            tokens: how many pass through the layers.
            keys: how many keys these tokens attend to, summed over the tokens.
            head_tokens: how many of the tokens get logits.
        """
        weights = self.body * tokens + self.head * head_tokens
        return 2 * weights + 4 * self.attention * keys

    def training_flops(self, tokens: float, keys: float, used_tokens: float) -> float:
        """FLOPs of a forward and a backward pass: 3 forward passes, if all weights are trained.

        The backward pass multiplies with each weight for the gradient of its input, and once more
        for its own if it has one. In the head it only does so for the tokens whose loss is used.
        (Below the first trained weight nothing needs an input's gradient: with adapters this
        counts a little too much, less than 1 % from 10 layers on.)

        Args:
            tokens: how many have a loss.
            keys: how many keys these tokens attend to, summed over the tokens.
            used_tokens: how many tokens' losses have a weight other than 0.
        """
        body = (self.body + self.trained_body) * tokens
        head = (self.head + self.trained_head) * used_tokens
        forward = self.forward_flops(tokens, keys, tokens)
        return forward + 2 * (body + head) + 8 * self.attention * keys


def model_work(model: Any) -> ModelWork:
    """Count the weights of a causal language model of `transformers`, adapters included.

    Raises:
        ValueError: not every token meets every weight in a linear layer, as with experts.
    """
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    counts = {False: [0, 0], True: [0, 0]}  # by whether it is the head: weights, trained weights
    replaced = _replaced(model)
    for module in model.modules():
        if module in replaced:
            continue
        if isinstance(module, nn.Linear):  # quantized weights have other shapes
            weights = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            weights = module.weight.numel()
        else:
            _check_countable(model, module)
            continue
        count = counts[module is head]
        count[0] += weights
        count[1] += weights * module.weight.requires_grad
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    (body, trained_body), (head_weights, trained_head) = counts[False], counts[True]
    attention = config.num_hidden_layers * heads * head_dim
    return ModelWork(body, head_weights, trained_body, trained_head, attention)


def _replaced(model: nn.Module) -> set[nn.Module]:
    """What PEFT keeps of layers that are trained whole, beside the copies that are run."""
    named = model.named_modules()
    kept = [module for name, module in named if name.rpartition(".")[2] == "original_module"]
    return {inner for module in kept for inner in module.modules()}


def _check_countable(model: Any, module: nn.Module) -> None:
    """Refuse weights that are neither a look-up nor a vector, and layers that choose experts.

    Quantized weights may be buffers: matrices of integers or of bytes, as masks (of bools) and
    tables of positions are not.
    """
    is_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)) or any(
        buffer.dim() > 1
        and buffer.dtype != torch.bool
        and (not buffer.is_floating_point() or buffer.element_size() == 1)
        for buffer in module.buffers(recurse=False)
    )
    if (is_matrix and not isinstance(module, nn.Embedding)) or "Expert" in type(module).__name__:
        raise ValueError(
            f"the FLOPs of {type(model).__name__} cannot be counted from its linear layers: it has "
            f"a {type(module).__name__}"
        )
