"""The plan of a run: a line for each thing that it reads, makes and takes, and its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.alignment import align_spans
from vocagnolm.attention import needs_segments
from vocagnolm.conventions import TEXT
from vocagnolm.io import count_reasons
from vocagnolm.method import Method
from vocagnolm.models.load import decoder_layers, devices_of_a_machine
from vocagnolm.run.config import VocAgnoConfig
from vocagnolm.run.resume import mixed_counts, step_of
from vocagnolm.spans import encode
from vocagnolm.token_loss import tile_rows

if TYPE_CHECKING:
    from vocagnolm.data import Segments
    from vocagnolm.run.job import Documents, Job, Models

# Devices of the machines that a plan made by one process alone is for.
_USUAL_MACHINE = 8
_GIB = 2**30


def plan(job: Job, models: Models, documents: Documents, checkpoint: str | None = None) -> str:
    """Describe a run in lines that begin with a word each; nothing is loaded for it."""
    student, run, memory = models.student.sizes, job.args, device_memory(job, models)
    lines = [f"student    {job.model.student}: {student.parameters:,} parameters"]
    if student.trained < student.parameters:
        lines[0] += f", {student.trained:,} of them trained"
    for teacher in models.teachers:
        size = f"{teacher.sizes.parameters:,} parameters, frozen, {models.teacher_dtype}"
        lines.append(f"teacher    {teacher.source.name}: {size}")
    if models.guide:
        lines += [f"teacher    {stored}" for stored in models.guide.describe()]
    lines.append(f"method     {_method(job)}")
    lines += describe_documents(documents, models)
    if len(documents.blocks.parts) > 1:
        lines.append(f"mixture    {_mixture(job, documents)}")
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in memory.items())
    lines += [
        f"batch      {run.batch_arithmetic()}",
        f"steps      {_steps(job, documents, checkpoint)}",
        f"memory     about {sum(memory.values()) / _GIB:.2f} GiB a device: {parts}",
        f"output     {run.output_dir}",
    ]
    return "\n".join(lines)


def _method(job: Job) -> str:
    """Name the method, and those of its settings that are not the paper's."""
    settings = job.args.in_effect()
    changed = [f"{x} {y}" for x, y in settings.items() if y != getattr(Method, x) and x != "method"]
    return ", ".join([str(settings["method"]), *changed])


# -- Documents and steps -----------------------------------------------------------------------


def describe_documents(documents: Documents, models: Models) -> list[str]:
    """Count what was aligned and packed, and what was left out and why."""
    blocks, lines = documents.blocks, []
    lines += [f"files      {note}" for note in documents.files]
    for each in documents.corpora:
        segments = each.segments
        count = len(np.unique(segments.rows.with_format("numpy")["document"][:]))
        sample = "" if each.total == len(each.texts) else "of the first ones, "
        lines.append(
            f"corpus     {Path(each.name).name}: {sample}{count:,} documents, "
            f"{len(segments.rows):,} segments, {segments.total('student_tokens'):,} student tokens"
        )
    segments = documents.segments
    if segments.skipped:
        lines.append(f"skipped    {len(segments.skipped):,} documents ({skip_reasons(segments)})")
    if messages := segments.total("left_out_messages"):
        lines.append(f"shortened  conversations, by their last {messages:,} messages in all")
    if trimmed := segments.total("trimmed_characters"):
        lines.append(f"trimmed    {trimmed:,} characters of white space, by chat templates")
    if models.guide:
        student, teacher = segments.total("student_tokens"), segments.total("teacher_tokens")
        lines.append(
            f"aligned    {teacher:,} teacher tokens ({teacher / student:.3f} per student token), "
            f"{segments.mapped_text_fraction:.2%} of the text tokens mapped"
        )
        if models.guide.readers:
            lines.append(f"example    {_example(documents, models)}")
    lines.append(
        f"packed     {len(blocks):,} sequences of {blocks.max_length} tokens, "
        f"{blocks.fill_fraction:.1%} full"
    )
    if documents.eval_blocks is not None:
        lines.append(f"evaluated  {len(documents.eval_blocks):,} sequences")
    return lines


def _example(documents: Documents, models: Models) -> str:
    """Show the first tokens of the first segment and those of the first teacher."""
    assert models.guide
    row = documents.segments.rows[0]
    text = documents.texts[row["document"]][TEXT][row["start"] : row["end"]]
    ours = encode(models.reader.tokenizer, text).spans
    theirs = encode(models.guide.readers[0].tokenizer, text).spans
    shown = []
    for (start, end), (first, last) in zip(ours, align_spans(ours, theirs), strict=True):
        # An unmapped token has the range (-1, -1), of which nothing is left.
        pieces = " ".join(repr(text[a:b]) for a, b in theirs[max(first, 0) : max(last, 0)])
        shown.append(f"{text[start:end]!r} -> {pieces or 'unmapped'}")
    return " | ".join(shown[:6])


def _mixture(job: Job, documents: Documents) -> str:
    """Describe in which shares several corpora are read, and how often each is."""
    sizes = _sizes(documents) or [*documents.blocks.parts.values()]
    weights = documents.blocks.weights or sizes
    read = (steps_of(job, documents) or 0) * (job.args.global_batch_tokens // job.args.max_length)
    shown = []
    for name, size, weight in zip(documents.blocks.parts, sizes, weights, strict=True):
        share = weight / sum(weights)
        shown.append(f"{name} {share:.1%} (read {read * share / size:.3g} times)")
    return ", ".join(shown)


def skip_reasons(segments: Segments) -> str:
    """Return the three most frequent reasons for leaving a document out, with counts."""
    return count_reasons(reason for _, reason in segments.skipped)


def _steps(job: Job, documents: Documents, checkpoint: str | None) -> str:
    steps = steps_of(job, documents)
    if steps is None:
        return "known when the whole corpus is read"
    shown = f"{steps:,}, {steps * job.args.global_batch_tokens:,} tokens"
    if not documents.is_whole and job.args.max_steps <= 0:
        read = sum(len(each.texts) for each in documents.corpora)
        total = sum(each.total or 0 for each in documents.corpora)
        shown = f"about {shown} (from {read:,} of {total:,} documents)"
    return f"{shown}; {step_of(checkpoint):,} done, from {checkpoint}" if checkpoint else shown


def steps_of(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of a run; None if nobody knows how large its corpus is."""
    if job.args.max_steps > 0:
        return job.args.max_steps
    of_epoch = epoch_steps(job, documents)
    return None if of_epoch is None else math.ceil(job.args.num_train_epochs * of_epoch)


def epoch_steps(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of an epoch, extrapolated from a sample; None if nobody knows."""
    sizes, weights = _sizes(documents), documents.blocks.weights
    if sizes is None:
        return None
    read = sum(sizes) if weights is None else mixed_counts(sizes, weights).sum()
    return int(read) // (job.args.global_batch_tokens // job.args.max_length)


def _sizes(documents: Documents) -> list[float] | None:
    """Extrapolate the packed sequences of each corpus; None if nobody knows its documents."""
    sizes = []
    for count, each in zip(documents.blocks.parts.values(), documents.corpora, strict=True):
        if each.total is None:
            return None
        sizes.append(count * each.total / len(each.texts))
    return sizes


# -- Memory ------------------------------------------------------------------------------------

# Of a device at its fullest, in the student's backward pass, within 3 % of what tensors take
# (tests/cuda/test_memory.py). Left out are buffers of libraries, about 1.5 GiB with NCCL, and a
# teacher's activations, which are gone by then.

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
    # Those with a gradient, and the weights of linear layers other than the output head.
    trained: int
    linear: int
    # Those of the layer in use, of the next one, and outside of all layers: gathered if sharded.
    gathered: int
    layers: int
    # Widths of the residuals, within the MLP, and of all heads of keys.
    hidden: int
    inner: int
    keys: int
    # Words of the output head, and its weights that have a gradient.
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
    gathered = total - sum(layers) + 2 * max(layers, default=0)
    return Sizes(
        parameters=total,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        linear=sum(
            module.weight.numel()
            for module in model.modules()
            if isinstance(module, nn.Linear) and module is not head
        ),
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


def student_layout(run: VocAgnoConfig, attention: str | None = None) -> Layout:
    """Return how the student is spread and computes, as Trainer and Accelerate read it."""
    given = vars(run)
    mask = run.max_length if run.is_mixed and not needs_segments(attention) else 0
    # Transformers is about to rename the option: one of the two may be absent.
    recomputes = any(given.get(f"{name}_checkpointing") for name in ("gradient", "activation"))
    accumulates = (run.gradient_accumulation_steps or 1) > 1
    if not run.is_sharded:
        precision: Precision = "mixed" if run.is_mixed else "float32"
        return Layout(run.world_size, None, precision, recomputes, accumulates, mask=mask)
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
        mask=mask,
    )


def student_memory(student: Sizes, layout: Layout, tokens: float) -> dict[str, float]:
    """Estimate the bytes of a device by part, for a micro-batch of so many tokens."""
    state = _WEIGHT * student.parameters + (_GRADIENT + _MOMENTS) * student.trained
    parts: dict[str, float] = {"student with AdamW": state / (layout.shards or 1)}
    if layout.shards is not None:
        width = 4 if layout.precision == "float32" else 2
        gathered = student.gathered if layout.reshards else student.parameters
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
    per_hidden, per_inner, of_input = _KEPT[layout.precision]
    # Frozen norms keep 8 bytes less, adapters the inputs of all linear layers in 16 bits.
    if layout.precision == "mixed" and student.trained < student.linear:
        per_hidden -= 6
    layer = per_hidden * student.hidden + per_inner * student.inner
    # PyTorch makes a mask of numbers in every layer, and transformers repeats keys and values.
    if layout.mask:
        layer += 2 * layout.mask + 4 * (student.hidden - student.keys)
    kept = student.layers * layer
    # The inputs of all layers, and one layer made again.
    if layout.recomputes:
        kept = student.layers * of_input * student.hidden + layer
    parts["activations"] = tokens * kept
    parts["output head"] = _head_memory(student, layout, tokens)
    return parts


def _head_memory(student: Sizes, layout: Layout, tokens: float) -> float:
    """Estimate the bytes of a backward pass through the output head, by tiles."""
    tile = min(tokens, tile_rows(student.words)) * student.words
    if layout.precision == "float32":
        return 4 * tile + 4 * student.trained_head + 12 * tokens * student.hidden
    # Logits and their gradient in 16 bits; the gradient's sum and what a tile adds to it.
    head = 6 * tile + 8 * student.trained_head
    if layout.shards is not None:  # the weight in 16 bits is a gathered one
        return head + 8 * tokens * student.hidden
    # The states before and behind the last norm, and their gradient.
    return head + 2 * student.words * student.hidden + 12 * tokens * student.hidden


def teacher_memory(
    teacher: Sizes, width: int, quantization: str | None = None, devices: int = 1
) -> dict[str, float]:
    """Estimate the bytes of a device by part, with the weights spread over so many devices.

    The width is that of a parameter that is not quantized; JSON for a quantization gives no bytes.
    """
    narrower = width - _QUANTIZED.get(quantization or "", float(width))
    size = width * teacher.parameters - narrower * teacher.linear
    is_known = quantization is None or quantization in _QUANTIZED
    parts = {"teacher" if is_known else "teacher (at full width)": size / devices}
    # A forward pass gathers some.
    if devices > 1:
        parts[GATHERED] = width * teacher.gathered
    return parts


def device_memory(job: Job, models: Models) -> dict[str, float]:
    """Estimate the bytes of a device by part, at its fullest."""
    tokens = (job.args.per_device_train_batch_size or 1) * job.args.max_length
    layout = student_layout(job.args, models.student.source.attn_implementation)
    parts = student_memory(models.student.sizes, layout, tokens)
    # What a teacher gathers is dropped before the student's pass.
    passing = parts["activations"] + parts["output head"]
    width = 4 if models.teacher_dtype == "float32" else 2
    devices = 1
    if job.args.teacher_sharding == "node":
        devices = devices_of_a_machine() if devices_of_a_machine() > 1 else _USUAL_MACHINE
    for teacher in models.teachers:
        quantization = job.args.teacher_quantization
        for name, size in teacher_memory(teacher.sizes, width, quantization, devices).items():
            if name == GATHERED:
                size = max(0.0, size - passing)
            parts[name] = parts.get(name, 0.0) + size
    return {name: size for name, size in parts.items() if size}
