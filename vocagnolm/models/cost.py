"""What a model weighs and costs: bytes of a training step, and FLOPs of its tokens.

Bytes are the peak on one device, which is in the student's backward pass, within 3 % of what
tensors take (tests/cuda/test_memory.py). They leave out buffers of libraries, about 1.5 GiB with
NCCL, and a teacher's activations, which are freed by then.

FLOPs are counted from linear layers, and only for the matrix products that the losses need: no
padding, no recomputation, and attention to visible keys only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from vocagnolm.output_head import tile_rows

# "mixed": float32 weights and residuals, with products in 16 bits, as under autocast. "16 bits":
# all of the forward pass, as under FSDP2 with mixed precision.
Precision = Literal["float32", "mixed", "16 bits"]


class _Kept(NamedTuple):
    """Bytes that a layer keeps of a token for its backward pass, counted on Llama's layers."""

    per_hidden: int
    per_inner: int
    # Per hidden unit, if only the layer's input is kept.
    of_input: int


_KEPT: dict[Precision, _Kept] = {
    "float32": _Kept(per_hidden=28, per_inner=18, of_input=4),
    "mixed": _Kept(per_hidden=28, per_inner=9, of_input=4),
    "16 bits": _Kept(per_hidden=18, per_inner=9, of_input=2),
}
# Bytes of a parameter in float32. AdamW has two moments.
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, 8
GATHERED = "teacher's gathered weights"
# Bytes of a weight by --teacher_quantization. nf4 has a float32 scale for every 64 weights.
_QUANTIZED = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Sizes:
    """The counts that determine a model's memory."""

    parameters: int
    # Parameters with a gradient, and weights of linear layers other than the output head.
    trained: int
    linear: int
    # Parameters of the current layer, of the next one, and outside all layers. They are gathered if
    # the model is sharded.
    gathered: int
    layers: int
    # The widths of the residuals, inside the MLP, and of all key heads.
    hidden: int
    inner: int
    keys: int
    # The words of the output head, and the number of its weights with a gradient.
    words: int
    trained_head: int


def sizes_of(model: PreTrainedModel | nn.Module) -> Sizes:
    """Count a causal language model, with or without adapters. It may be on the meta device."""
    whole = cast(PreTrainedModel, model)
    text = whole.config.get_text_config()
    # Configurations of remote code may use other names.
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    count, hidden, inner = (getattr(text, name, None) or 0 for name in names)
    head = whole.get_output_embeddings()  # type: ignore[no-untyped-call]
    total = trained = linear = 0
    for parameter in model.parameters():
        total += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            linear += module.weight.numel()
    layers = []
    for layer in decoder_layers(whole):
        layers.append(sum(parameter.numel() for parameter in layer.parameters()))
    # Keys are as wide as their heads, which several query heads may share.
    heads = getattr(text, "num_attention_heads", None) or 1
    groups = getattr(text, "num_key_value_heads", None) or heads
    keys = groups * (getattr(text, "head_dim", None) or hidden // heads)
    # While a layer runs, FSDP2 already gathers the next one. Parameters outside all layers stay
    # gathered.
    gathered = total - sum(layers) + 2 * max(layers, default=0)
    return Sizes(
        parameters=total,
        trained=trained,
        linear=linear,
        gathered=min(gathered, total),
        layers=count,
        hidden=hidden,
        inner=inner or 4 * hidden,
        keys=keys,
        words=head.weight.shape[0],
        trained_head=head.weight.numel() if head.weight.requires_grad else 0,
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated layers, which a model says must not be split. Some models name none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@dataclass(frozen=True)
class Layout:
    """Distribution and precision of a student in training."""

    devices: int = 1
    # Devices over which FSDP2 spreads its weights; None for DDP and for one device.
    shards: int | None = None
    precision: Precision = "float32"
    # Layers keep only their inputs, and run again in the backward pass.
    recomputes: bool = False
    # Whether a step has several micro-batches.
    accumulates: bool = False
    # Whether gathered weights are freed between a forward and its backward pass.
    reshards: bool = False
    # Columns of the mask that keeps packed documents apart; 0 for attention without a mask.
    mask: int = 0


def student_memory(student: Sizes, layout: Layout, tokens: float) -> dict[str, float]:
    """Estimate the bytes of a device by part, for a micro-batch of `tokens` tokens."""
    state = _WEIGHT * student.parameters + (_GRADIENT + _MOMENTS) * student.trained
    parts: dict[str, float] = {"student with AdamW": state / (layout.shards or 1)}
    if layout.shards is not None:
        width = 4 if layout.precision == "float32" else 2
        gathered = student.gathered if layout.reshards else student.parameters
        parts["gathered weights"] = width * gathered
        # Gradients are reduced only with the last micro-batch, and are whole until then.
        if layout.accumulates:
            parts["whole gradients"] = _GRADIENT * student.trained
    else:
        if layout.devices > 1:
            parts["gradients to send"] = _GRADIENT * student.trained
        # Autocast keeps its copies of the weights for the backward pass.
        if layout.precision == "mixed" and not layout.recomputes:
            parts["weights in 16 bits"] = 2 * student.linear
    kept = _KEPT[layout.precision]
    layer = kept.per_hidden * student.hidden + kept.per_inner * student.inner
    # Frozen norms keep 8 bytes less. Adapters keep the inputs of all linear layers in 16 bits.
    if layout.precision == "mixed" and student.trained < student.linear:
        layer -= 6 * student.hidden
    # PyTorch makes a float mask in every layer, and transformers repeats keys and values.
    if layout.mask:
        layer += 2 * layout.mask + 4 * (student.hidden - student.keys)
    activations = student.layers * layer
    # The inputs of all layers are kept, and one layer at a time is recomputed.
    if layout.recomputes:
        activations = student.layers * kept.of_input * student.hidden + layer
    parts["activations"] = tokens * activations
    parts["output head"] = _head_memory(student, layout, tokens)
    return parts


def _head_memory(student: Sizes, layout: Layout, tokens: float) -> float:
    """Estimate the bytes of a backward pass through the output head, which works in tiles."""
    tile = min(tokens, tile_rows(student.words)) * student.words
    if layout.precision == "float32":
        return 4 * tile + 4 * student.trained_head + 12 * tokens * student.hidden
    # Logits and their gradient in 16 bits, the gradient's sum, and what a tile adds to it.
    head = 6 * tile + 8 * student.trained_head
    # Under FSDP2, the weight in 16 bits is among the gathered ones.
    if layout.shards is not None:
        return head + 8 * tokens * student.hidden
    # The states before and after the last norm are kept in float32, and so is their gradient.
    return head + 2 * student.words * student.hidden + 12 * tokens * student.hidden


def teacher_memory(
    teacher: Sizes, width: int, quantization: str | None = None, devices: int = 1
) -> dict[str, float]:
    """Estimate the bytes of a device by part, with the weights spread over `devices`.

    The width is that of an unquantized parameter. Quantization given as JSON has no known size.
    """
    narrower = width - _QUANTIZED.get(quantization or "", float(width))
    size = width * teacher.parameters - narrower * teacher.linear
    is_known = quantization is None or quantization in _QUANTIZED
    parts = {"teacher" if is_known else "teacher (at full width)": size / devices}
    # A forward pass gathers the weights of one layer at a time.
    if devices > 1:
        parts[GATHERED] = width * teacher.gathered
    return parts


# -- FLOPs ----------------------------------------------------------------------------------------


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
