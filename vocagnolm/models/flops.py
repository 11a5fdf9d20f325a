"""FLOPs of a decoder, counted from its linear layers.

Counts only matrix products that the losses need: no padding, no recomputation, and attention to
visible keys only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class ModelWork:
    """Cost of tokens in a decoder, with two FLOPs for each multiplication and its addition.

    Attributes:
        body: weights of all linear layers without the output head; the embedding is a look-up.
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
        """Count the FLOPs of a forward pass of tokens that attend to `keys` keys in total."""
        # Only tokens with a loss pass through the head.
        weights = self.body * tokens + self.head * head_tokens
        # Q K^T and A V are two products for each key, with two FLOPs per multiplication.
        return 2 * weights + 4 * self.attention * keys

    def training_flops(self, tokens: float, keys: float, used_tokens: float) -> float:
        """Count the FLOPs of a forward and backward pass. The head reads only the used tokens."""
        # In the backward pass, each weight is multiplied for the gradient of its input, and again
        # for its own if it is trained. (Below the first trained weight, nothing needs an input's
        # gradient. With adapters this counts slightly too much, less than 1 % from 10 layers on.)
        body = (self.body + self.trained_body) * tokens
        head = (self.head + self.trained_head) * used_tokens
        forward = self.forward_flops(tokens, keys, tokens)
        return forward + 2 * (body + head) + 8 * self.attention * keys


def model_work(model: PreTrainedModel) -> ModelWork:
    """Count the weights of a causal language model of `transformers`, including adapters.

    Raises:
        ValueError: tokens skip some weights of linear layers, as in a mixture of experts.
    """
    config = model.config.get_text_config()
    output_head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    body = head = trained_body = trained_head = 0
    for name, module in model.named_modules():
        # PEFT keeps a layer's original next to its trained copy, and only the copy runs.
        if "original_module" in name.split("."):
            continue
        # Count a layer by its features, because quantized weights have other shapes.
        if isinstance(module, nn.Linear):
            count = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count = module.weight.numel()
        elif isinstance(module, nn.Embedding) or not _has_weights(module):
            continue
        else:
            raise ValueError(
                f"the FLOPs of {type(model).__name__} cannot be counted from its linear layers: it "
                f"has a {type(module).__name__}"
            )
        # A frozen weight needs no product for its own gradient.
        trained = count * module.weight.requires_grad
        if module is output_head:
            head, trained_head = head + count, trained_head + trained
        else:
            body, trained_body = body + count, trained_body + trained
    # Count all query heads, even if several share their keys, because each multiplies.
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelWork(body, head, trained_body, trained_head, layers * heads * head_dim)


def _has_weights(module: nn.Module) -> bool:
    """Return True for a matrix, quantized or not."""
    weights: list[Tensor] = [*module.parameters(recurse=False)]
    # Quantized weights may be buffers of integers or bytes. Masks are buffers of bools, and tables
    # of positions are buffers of floats. Neither is a weight.
    for buffer in module.buffers(recurse=False):
        is_table = buffer.is_floating_point() and buffer.element_size() > 1
        if not is_table and buffer.dtype != torch.bool:
            weights.append(buffer)
    return any(weight.dim() > 1 for weight in weights)
