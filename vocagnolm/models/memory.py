"""Memory of a training step, estimated from the sizes of its models.

This is the peak on one device, which is in the student's backward pass, within 3 % of what tensors
take (tests/cuda/test_memory.py). It leaves out buffers of libraries, about 1.5 GiB with NCCL, and a
teacher's activations, which are freed by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.models.sharding import decoder_layers
from vocagnolm.output_head import tile_rows

# "mixed": float32 weights and residuals, with products in 16 bits, as under autocast. "16 bits":
# all of the forward pass, as under FSDP2 with mixed precision.
Precision = Literal["float32", "mixed", "16 bits"]
# What a layer keeps of a token for its backward pass: bytes per hidden and per inner unit, counted
# on Llama's layers. Or per hidden unit, if only the layer's input is kept.
_KEPT: dict[Precision, tuple[int, int, int]] = {
    "float32": (28, 18, 4),
    "mixed": (28, 9, 4),
    "16 bits": (18, 9, 2),
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
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output head: give a causal language model")
    layers = [_parameters(layer) for layer in decoder_layers(whole)]
    total = _parameters(model)
    trained = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
    linear = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not head:
            linear += module.weight.numel()
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
        keys=_key_width(text, hidden),
        words=head.weight.shape[0],
        trained_head=head.weight.numel() if head.weight.requires_grad else 0,
    )


def _key_width(config: PreTrainedConfig, hidden: int) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    groups = getattr(config, "num_key_value_heads", None) or heads
    return groups * (getattr(config, "head_dim", None) or hidden // heads)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
    per_hidden, per_inner, of_input = _KEPT[layout.precision]
    # Frozen norms keep 8 bytes less. Adapters keep the inputs of all linear layers in 16 bits.
    if layout.precision == "mixed" and student.trained < student.linear:
        per_hidden -= 6
    layer = per_hidden * student.hidden + per_inner * student.inner
    # PyTorch makes a float mask in every layer, and transformers repeats keys and values.
    if layout.mask:
        layer += 2 * layout.mask + 4 * (student.hidden - student.keys)
    activations = student.layers * layer
    # The inputs of all layers are kept, and one layer at a time is recomputed.
    if layout.recomputes:
        activations = student.layers * of_input * student.hidden + layer
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
