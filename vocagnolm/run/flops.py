"""Count the FLOPs of a decoder from its linear layers, and look up the GPU's peak: MFU."""

import logging
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vocagnolm.io import read_asset

logger = logging.getLogger(__name__)

_PEAKS = read_asset("peak_tflops.yaml")


def peak_tflops(device_name: str) -> float | None:
    """Peak of a GPU in dense bfloat16, in TFLOP/s, or None where the table has none.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA H100 PCIe")
    (989.4, 756.5)
    >>> peak_tflops("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    known = [name for name in _PEAKS["tflops"] if words.issuperset(name.split())]
    if not known or words.intersection(_PEAKS["other_chips"].split()):
        return None
    peak: float = _PEAKS["tflops"][max(known, key=lambda name: len(name.split()))]
    return peak


def peak_flops(device: torch.device, peak: float | None) -> float | None:
    """Peak of a device in FLOP/s: the given one in TFLOP/s, or that of a known GPU."""
    if peak is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = peak_tflops(name)
        if peak is None:
            logger.warning(
                "no MFU is reported: the peak of %s is unknown; give it with --device_peak_tflops",
                name,
            )
    return None if peak is None else peak * 1e12


@dataclass(frozen=True)
class ModelWork:
    """Cost of tokens in a decoder, from which MFU follows: model FLOPs / (seconds x peak FLOP/s).

    Only matrix products count, two FLOPs for each multiplication with its addition, and only those
    that the losses need: no padding, no recomputation, attention to the visible keys. So with
    activation checkpointing, where the hardware does 4 forward passes' worth for every 3, its
    utilisation is up to 4/3 of the MFU.

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
        """FLOPs of a forward pass of tokens that attend to so many keys in all."""
        weights = self.body * tokens + self.head * head_tokens
        return 2 * weights + 4 * self.attention * keys

    def training_flops(self, tokens: float, keys: float, used_tokens: float) -> float:
        """FLOPs of a forward and a backward pass: 3 forward passes, if all weights are trained.

        `used_tokens` are those whose loss has a weight other than 0.
        """
        # Backward, each weight is multiplied for the gradient of its input, and once more for its
        # own if it has one; in the head for the used tokens only. (Below the first trained weight
        # nothing needs an input's gradient: with adapters this counts a little too much, less than
        # 1 % from 10 layers on.)
        body = (self.body + self.trained_body) * tokens
        head = (self.head + self.trained_head) * used_tokens
        forward = self.forward_flops(tokens, keys, tokens)
        return forward + 2 * (body + head) + 8 * self.attention * keys


def model_work(model: PreTrainedModel) -> ModelWork:
    """Count the weights of a causal language model of `transformers`, adapters included.

    Raises:
        ValueError: not every token meets every weight in a linear layer, as with experts.
    """
    config = model.config.get_text_config()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weights, trained = {False: 0, True: 0}, {False: 0, True: 0}  # by whether it is the head
    for name, module in model.named_modules():
        # A layer that PEFT keeps of before, beside the trained copy of it that runs.
        if "original_module" in name.split("."):
            continue
        # By its features: quantized weights have other shapes.
        if isinstance(module, nn.Linear):
            count = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count = module.weight.numel()
        else:
            _check_countable(model, module)
            continue
        weights[module is head] += count
        trained[module is head] += count * module.weight.requires_grad
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = layers * heads * head_dim
    return ModelWork(weights[False], weights[True], trained[False], trained[True], attention)


def _check_countable(model: nn.Module, module: nn.Module) -> None:
    """Refuse weights that are neither a look-up nor a vector, and layers that choose experts."""

    def is_quantized(buffer: Tensor) -> bool:
        # A matrix of integers or bytes, unlike masks (bools) and tables of positions (floats).
        is_float, is_mask = buffer.is_floating_point(), buffer.dtype == torch.bool
        return buffer.dim() > 1 and not is_mask and (not is_float or buffer.element_size() == 1)

    has_matrix = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    is_matrix = has_matrix or any(map(is_quantized, module.buffers(recurse=False)))
    if (is_matrix and not isinstance(module, nn.Embedding)) or "Expert" in type(module).__name__:
        raise ValueError(
            f"the FLOPs of {type(model).__name__} cannot be counted from its linear layers: it has "
            f"a {type(module).__name__}"
        )
