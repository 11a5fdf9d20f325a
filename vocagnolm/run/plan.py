"""The plan of a run: one line for each thing that it reads and makes, and its memory."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

from vocagnolm.attention import needs_segments
from vocagnolm.data import skip_reasons
from vocagnolm.method import Method
from vocagnolm.models.cost import GATHERED, Layout, Precision, student_memory, teacher_memory
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.job import Job
from vocagnolm.training.models import Models
from vocagnolm.training.packed import Packed, steps_of
from vocagnolm.training.run_directory import step_of

# If one process makes a plan alone, it is for machines with this many devices.
_USUAL_MACHINE = 8
# The rest is left to the buffers of libraries.
_FILLED = 0.9
_GIB = 2**30


def plan(job: Job, models: Models, packed: Packed, checkpoint: str | None = None) -> str:
    """Describe a run in lines that each begin with a word. Nothing is loaded for it."""
    student, run, memory = models.student.sizes, job.args, device_memory(job, models)
    lines = [f"student    {job.model.student}: {student.parameters:,} parameters"]
    if student.trained < student.parameters:
        lines[0] += f", {student.trained:,} of them trained"
    for teacher in models.teachers:
        size = f"{teacher.sizes.parameters:,} parameters, frozen, {models.teacher_dtype}"
        lines.append(f"teacher    {teacher.source.name}: {size}")
    # A store has no model that the loop above could name, so its reader describes it.
    if models.teacher_readers and job.model.teacher_losses:
        lines += [f"teacher    {stored}" for stored in models.teacher_readers.describe()]
    precision = "float32"
    if run.is_mixed:
        precision = f"products in {'float16' if run.fp16 else 'bfloat16'}, weights in float32"
    lines.append(f"precision  {precision} ({run.why_precision})")
    if run.compiles_layers:
        lines.append("compiled   the layers of all models, each kind once")
    # The method, and its settings that differ from the paper's.
    method = [run.method]
    for name, value in run.guidance.in_effect().items():
        if name != "method" and value != getattr(Method, name):
            method.append(f"{name} {value}")
    lines.append(f"method     {', '.join(method)}")
    lines += describe_documents(packed, models)
    if len(packed.blocks.parts) > 1:
        lines.append(f"mixture    {_mixture(job, packed)}")
    parts = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in memory.items())
    lines += [
        f"batch      {run.batch_arithmetic()}",
        f"steps      {_steps(job, packed, checkpoint)}",
        f"memory     about {sum(memory.values()) / _GIB:.2f} GiB a device: {parts}",
        f"output     {run.output_dir}",
    ]
    return "\n".join(lines)


# -- Documents and steps -----------------------------------------------------------------------


def describe_documents(packed: Packed, models: Models) -> list[str]:
    """Count what was aligned and packed, and what was left out and why."""
    blocks, lines = packed.blocks, []
    lines += [f"files      {note}" for note in packed.files]
    corpora = zip(packed.texts.items(), packed.parts, packed.totals, strict=True)
    for (name, texts), part, total in corpora:
        # Skipped documents have no segment, so they are not counted here.
        count = part.count_documents()
        sample = "" if total == len(texts) else "of the first ones, "
        lines.append(
            f"corpus     {Path(name).name}: {sample}{count:,} documents, "
            f"{len(part.rows):,} segments, {part.total('student_tokens'):,} student tokens"
        )
    segments = packed.segments
    assert segments
    if segments.skipped:
        lines.append(f"skipped    {len(segments.skipped):,} documents ({skip_reasons(segments)})")
    if len(segments.weights):
        lines.append(f"weights    {segments.describe_weights()}")
    messages = segments.total("left_out_messages")
    if messages:
        lines.append(f"shortened  conversations, by their last {messages:,} messages in all")
    trimmed = segments.total("trimmed_characters")
    if trimmed:
        lines.append(f"trimmed    {trimmed:,} characters of white space, by chat templates")
    if models.teacher_readers:
        student, teacher = segments.total("student_tokens"), segments.total("teacher_tokens")
        lines.append(
            f"aligned    {teacher:,} teacher tokens ({teacher / student:.3f} per student token), "
            f"{segments.mapped_text_fraction:.2%} of the text tokens mapped"
        )
    lines.append(
        f"packed     {len(blocks):,} sequences of {blocks.max_length} tokens, "
        f"{blocks.fill_fraction:.1%} full"
    )
    if packed.eval_blocks is not None:
        lines.append(f"evaluated  {len(packed.eval_blocks):,} sequences")
    return lines


def _mixture(job: Job, packed: Packed) -> str:
    """Say in which shares several corpora are read, and how often each."""
    # If a corpus has no known size, its numbers are only those of its first documents.
    sizes = packed.expected_sequences() or list(packed.blocks.parts.values())
    weights = packed.blocks.weights or sizes
    sequences = (steps_of(job, packed) or 0) * (job.args.global_batch_tokens // job.args.max_length)
    shares = []
    for name, size, weight in zip(packed.blocks.parts, sizes, weights, strict=True):
        # Without weights, the sizes take their place, and every corpus is read once per epoch.
        share = weight / sum(weights)
        shares.append(f"{name} {share:.1%} (read {sequences * share / size:.3g} times)")
    return ", ".join(shares)


def _steps(job: Job, packed: Packed, checkpoint: str | None) -> str:
    steps = steps_of(job, packed)
    if steps is None:
        return "known when the whole corpus is read"
    description = f"{steps:,}, {steps * job.args.global_batch_tokens:,} tokens"
    # A requested number of steps is exact, whatever the corpus contains.
    if not packed.is_whole and job.args.max_steps <= 0:
        read = sum(len(texts) for texts in packed.texts.values())
        total = sum(total or 0 for total in packed.totals)
        description = f"about {description} (from {read:,} of {total:,} documents)"
    if checkpoint:
        description += f"; {step_of(checkpoint):,} done, from {checkpoint}"
    return description


def student_layout(run: VocAgnoConfig, attention: str | None = None) -> Layout:
    """Return how the student is distributed and computes, as Trainer and Accelerate will do it."""
    mask = run.max_length if run.is_mixed and not needs_segments(attention) else 0
    recomputes = bool(run.gradient_checkpointing)
    accumulates = (run.gradient_accumulation_steps or 1) > 1
    if not run.is_sharded:
        precision: Precision = "mixed" if run.is_mixed else "float32"
        return Layout(run.world_size, None, precision, recomputes, accumulates, mask=mask)
    # If the options say nothing, both classes read the environment that `accelerate launch` sets.
    shards = (run.parallelism_config or ParallelismConfig()).dp_shard_size
    plugin = FullyShardedDataParallelPlugin(**(vars(run).get("fsdp_plugin_args") or {}))
    return Layout(
        devices=run.world_size,
        # Without a size of shards, FSDP2 spreads the weights over all devices.
        shards=shards if shards > 1 else run.world_size,
        precision="16 bits" if run.is_mixed else "float32",
        recomputes=recomputes or bool(plugin.activation_checkpointing),
        accumulates=accumulates,
        reshards=bool(plugin.reshard_after_forward),
        mask=mask,
    )


def device_memory(job: Job, models: Models) -> dict[str, float]:
    """Estimate the peak bytes of a device, by part."""
    tokens = (job.args.per_device_train_batch_size or 1) * job.args.max_length
    layout = student_layout(job.args, models.student.source.attn_implementation)
    parts = student_memory(models.student.sizes, layout, tokens)
    # What a teacher gathers is freed before the student's pass, and so takes the room of the
    # student's activations. Only what exceeds that room counts.
    passing = parts["activations"] + parts["output head"]
    width = 4 if models.teacher_dtype == "float32" else 2
    devices = 1
    if job.args.teacher_sharding == "node":
        devices = devices_of_a_machine() if devices_of_a_machine() > 1 else _USUAL_MACHINE
    for teacher in models.teachers:
        quantization = job.args.teacher_quantization
        # Teachers run one after another, but their weights stay in memory together.
        for name, size in teacher_memory(teacher.sizes, width, quantization, devices).items():
            if name == GATHERED:
                # What one teacher gathers is freed before the next one gathers its own.
                parts[name] = max(parts.get(name, 0.0), size - passing)
            else:
                parts[name] = parts.get(name, 0.0) + size
    return {name: size for name, size in parts.items() if size}


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU, or None for another device."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def fill_device(job: Job, models: Models, capacity: int | None) -> None:
    """Split a step into the largest micro-batches that take at most 90 % of a device's bytes.

    A split that was asked for stays, and so does that of a method to which the split matters. All
    processes must give the same capacity, because they take the same number of micro-batches.
    """
    run = job.args
    if capacity is None or not (run.is_split_derived and run.guidance.splits_alike):
        return
    sequences = run.per_device_train_batch_size * run.gradient_accumulation_steps
    for rows in range(sequences, 0, -1):
        if sequences % rows:
            continue
        run.per_device_train_batch_size = rows
        run.gradient_accumulation_steps = sequences // rows
        if sum(device_memory(job, models).values()) <= _FILLED * capacity:
            break
