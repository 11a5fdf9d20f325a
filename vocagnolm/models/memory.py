"""Memory of a training step, estimated from the sizes of its models.

Of a device at its fullest, in the student's backward pass, within 3 % of what tensors take
(tests/cuda/test_memory.py). Left out are buffers of libraries, about 1.5 GiB with NCCL, and a
teacher's activations, which are gone by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.models.sharding import decoder_layers
from vocagnolm.output_head import tile_rows

# "mixed": float32 weights and residuals, products in 16 bits, as under autocast; "16 bits": all of
# the forward pass, as under FSDP2 with mixed precision.
Precision = Literal["float32", "mixed", "16 bits"]
# What a layer's backward pass keeps of a token: bytes per hidden and per inner unit, counted on
# Llama's layers; and per hidden unit if only the layer's input is kept.
_KEPT: dict[Precision, tuple[int, int, int]] = {
    "float32": (28, 18, 4),
    "mixed": (28, 9, 4),
    "16 bits": (18, 9, 2),
}
# Bytes of a parameter: float32; AdamW has two moments.
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, 8
GATHERED = "teacher's gathered weights"
# Bytes of a weight by --teacher_quantization; nf4 has a float32 scale for 64 weights.
_QUANTIZED = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Sizes:
    """Counts that a model's memory follows from."""

    parameters: int
    # These are the parameters with a gradient, and the weights of linear layers other than the
    # output head.
    trained: int
    linear: int
    # These are the parameters of the layer in use, of the next one, and outside of all layers,
    # which are gathered if the model is sharded.
    gathered: int
    layers: int
    # These are the widths of the residuals, within the MLP, and of all heads of keys.
    hidden: int
    inner: int
    keys: int
    # These are the words of the output head, and its weights that have a gradient.
    words: int
    trained_head: int


def sizes_of(model: PreTrainedModel | nn.Module) -> Sizes:
    """Count a causal language model, with adapters or without; it may be on the meta device."""
    whole = cast(PreTrainedModel, model)
    text = whole.config.get_text_config()
    # Configurations of remote code may have other names.
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
    # While a layer runs, FSDP2 gathers the next one already. What is in no layer stays gathered.
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
    # Devices that FSDP2 spreads its weights over; None under DDP, and on one device.
    shards: int | None = None
    precision: Precision = "float32"
    # Layers keep their inputs only, and are run again.
    recomputes: bool = False
    # Several micro-batches make a step.
    accumulates: bool = False
    # Gathered weights are dropped between a forward and its backward pass.
    reshards: bool = False
    # Columns of the mask that keeps packed documents apart; 0 for attention that needs none.
    mask: int = 0


def student_memory(student: Sizes, layout: Layout, tokens: float) -> dict[str, float]:
    """Estimate the bytes of a device by part, for a micro-batch of `tokens` tokens."""
    state = _WEIGHT * student.parameters + (_GRADIENT + _MOMENTS) * student.trained
    parts: dict[str, float] = {"student with AdamW": state / (layout.shards or 1)}
    if layout.shards is not None:
        width = 4 if layout.precision == "float32" else 2
        gathered = student.gathered if layout.reshards else student.parameters
        parts["gathered weights"] = width * gathered
        # Gradients are reduced with the last micro-batch only, and are whole until then.
        if layout.accumulates:
            parts["whole gradients"] = _GRADIENT * student.trained
    else:
        if layout.devices > 1:
            parts["gradients to send"] = _GRADIENT * student.trained
        # Autocast keeps its copies of the weights for the backward pass.
        if layout.precision == "mixed" and not layout.recomputes:
            parts["weights in 16 bits"] = 2 * student.linear
    per_hidden, per_inner, of_input = _KEPT[layout.precision]
    # Frozen norms keep 8 bytes less, adapters the inputs of all linear layers in 16 bits.
    if layout.precision == "mixed" and student.trained < student.linear:
        per_hidden -= 6
    layer = per_hidden * student.hidden + per_inner * student.inner
    # PyTorch makes a mask of numbers in every layer, and transformers repeats keys and values.
    if layout.mask:
        layer += 2 * layout.mask + 4 * (student.hidden - student.keys)
    activations = student.layers * layer
    # The inputs of all layers are kept, and one layer at a time is computed again.
    if layout.recomputes:
        activations = student.layers * of_input * student.hidden + layer
    parts["activations"] = tokens * activations
    parts["output head"] = _head_memory(student, layout, tokens)
    return parts


def _head_memory(student: Sizes, layout: Layout, tokens: float) -> float:
    """Estimate the bytes of a backward pass through the output head, by tiles."""
    tile = min(tokens, tile_rows(student.words)) * student.words
    if layout.precision == "float32":
        return 4 * tile + 4 * student.trained_head + 12 * tokens * student.hidden
    # Logits and their gradient in 16 bits; the gradient's sum and what a tile adds to it.
    head = 6 * tile + 8 * student.trained_head
    # Under FSDP2 the weight in 16 bits is among the gathered ones.
    if layout.shards is not None:
        return head + 8 * tokens * student.hidden
    # The states before and after the last norm are kept in float32, and so is their gradient.
    return head + 2 * student.words * student.hidden + 12 * tokens * student.hidden


def teacher_memory(
    teacher: Sizes, width: int, quantization: str | None = None, devices: int = 1
) -> dict[str, float]:
    """Estimate the bytes of a device by part, with the weights spread over `devices`.

    The width is that of a parameter that is not quantized; JSON for a quantization gives no bytes.
    """
    narrower = width - _QUANTIZED.get(quantization or "", float(width))
    size = width * teacher.parameters - narrower * teacher.linear
    is_known = quantization is None or quantization in _QUANTIZED
    parts = {"teacher" if is_known else "teacher (at full width)": size / devices}
    # A forward pass gathers the weights of a layer at a time.
    if devices > 1:
        parts[GATHERED] = width * teacher.gathered
    return parts
