"""Memory of a device at its fullest, in the student's backward pass: bytes by part, from sizes.

Within 5 % of real runs. Left out are tiles of logits, buffers of libraries, and a teacher's
activations, which are gone by then.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, cast

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.models.layers import decoder_layers
from vocagnolm.run.config import RunArguments

# "mixed": float32 weights and residuals, products in 16 bits, as under autocast; "16 bits": all of
# the forward pass, as under FSDP2 with mixed precision.
Precision = Literal["float32", "mixed", "16 bits"]
# What a layer's backward pass keeps of a token: bytes per hidden and per inner unit, counted on
# Llama's layers; and per hidden unit if only the layer's input is kept.
_KEPT: dict[Precision, tuple[int, int]] = {
    "float32": (28, 18),
    "mixed": (28, 9),
    "16 bits": (18, 9),
}
_LAYER_INPUT: dict[Precision, int] = {"float32": 4, "mixed": 4, "16 bits": 2}
# Bytes of a parameter: float32; AdamW has two moments.
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, 8
# Bytes of a weight by --teacher_quantization; nf4 has a float32 scale for 64 weights.
_QUANTIZED = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Sizes:
    """Counts that a model's memory follows from."""

    parameters: int
    # Those with a gradient, and the weights of linear layers other than the output head.
    trained: int
    linear: int
    # Parameters of the largest decoder layer, the number of layers, and parameters outside of them.
    layer: int
    layers: int
    rest: int
    # Widths of the residuals, and within the MLP.
    hidden: int
    inner: int


def sizes_of(model: PreTrainedModel | nn.Module) -> Sizes:
    """Count a causal language model, with adapters or without; it may be on the meta device."""
    whole = cast(PreTrainedModel, model)
    text = whole.config.get_text_config()
    head = whole.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers: list[int] = []
    # Some models name no decoder layers.
    with suppress(ValueError):
        layers = [_parameters(layer) for layer in decoder_layers(whole)]
    total = _parameters(model)
    hidden = _number(text, "hidden_size")
    return Sizes(
        parameters=total,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        linear=sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not head
        ),
        layer=max(layers, default=0),
        layers=_number(text, "num_hidden_layers"),
        rest=total - sum(layers),
        hidden=hidden,
        inner=_number(text, "intermediate_size") or 4 * hidden,
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _number(config: PreTrainedConfig, name: str) -> int:
    # By attribute, because a configuration may map the name to one of its own.
    return getattr(config, name, None) or 0


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


def student_layout(run: RunArguments) -> Layout:
    """Return how the student is spread and computes, as Trainer and Accelerate read it."""
    given = vars(run)
    # Transformers is about to rename the option: one of the two may be absent.
    recomputes = any(given.get(f"{name}_checkpointing") for name in ("gradient", "activation"))
    accumulates = (run.gradient_accumulation_steps or 1) > 1
    if not run.is_sharded:
        precision: Precision = "mixed" if run.is_mixed else "float32"
        return Layout(run.world_size, None, precision, recomputes, accumulates)
    # Both read the environment that `accelerate launch` sets.
    shards = (given.get("parallelism_config") or ParallelismConfig()).dp_shard_size
    plugin = FullyShardedDataParallelPlugin(**(given.get("fsdp_plugin_args") or {}))
    return Layout(
        devices=run.world_size,
        shards=shards if shards > 1 else run.world_size,
        precision="16 bits" if run.is_mixed else "float32",
        recomputes=recomputes or bool(plugin.activation_checkpointing),
        accumulates=accumulates,
        reshards=bool(plugin.reshard_after_forward),
    )


def student_memory(student: Sizes, layout: Layout, tokens: float) -> dict[str, float]:
    """Estimate the bytes of a device by part, for a micro-batch of so many tokens."""
    state = _WEIGHT * student.parameters + (_GRADIENT + _MOMENTS) * student.trained
    parts: dict[str, float] = {"student with AdamW": state / (layout.shards or 1)}
    if layout.shards is not None:
        width = 4 if layout.precision == "float32" else 2
        gathered = _gathered(student) if layout.reshards else student.parameters
        parts["gathered weights"] = width * gathered
        # They are reduced with the last micro-batch only.
        if layout.accumulates:
            parts["whole gradients"] = _GRADIENT * student.trained
    else:
        if layout.devices > 1:
            parts["gradients to send"] = _GRADIENT * student.trained
        # Autocast keeps them for the backward pass.
        if layout.precision == "mixed" and not layout.recomputes:
            parts["weights in 16 bits"] = 2 * student.linear
    per_hidden, per_inner = _KEPT[layout.precision]
    layer = per_hidden * student.hidden + per_inner * student.inner
    kept = student.layers * layer
    # The inputs of all layers, and one layer made again.
    if layout.recomputes:
        kept = student.layers * _LAYER_INPUT[layout.precision] * student.hidden + layer
    parts["activations"] = tokens * kept
    return parts


def teacher_memory(
    teacher: Sizes, width: int, quantization: str | None = None, devices: int = 1
) -> dict[str, float]:
    """Estimate the bytes of a device by part, with the weights spread over so many devices.

    The width is that of a parameter that is not quantized; JSON for a quantization tells no bytes.
    """
    narrower = width - _QUANTIZED.get(quantization or "", float(width))
    size = width * teacher.parameters - narrower * teacher.linear
    is_known = quantization is None or quantization in _QUANTIZED
    parts = {"teacher" if is_known else "teacher (at full width)": size / devices}
    # A forward pass gathers some.
    if devices > 1:
        parts["teacher's gathered weights"] = width * _gathered(teacher)
    return parts


def _gathered(model: Sizes) -> int:
    """Count parameters of the layer in use, of the next one, and outside of all layers."""
    return min(model.rest + 2 * model.layer, model.parameters)
