"""What a run is going to do, and the memory that it takes: its head, and all of a dry run.

Reads what `vocagnolm.run.parse` has parsed; `vocagnolm.run.describe` puts parts into words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig

from vocagnolm.corpus import TEXT
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.packing import Blocks
from vocagnolm.run import describe as plan
from vocagnolm.run import memory
from vocagnolm.run import parse as config
from vocagnolm.run.job import Documents
from vocagnolm.run.pair import Pair, student_sizes, teacher_dtype, teacher_sizes

USUAL_MACHINE = 8  # devices


def describe(pair: Pair, arguments: config.Arguments, documents: Documents, blocks: Blocks) -> str:
    """The plan of a run."""
    model, data, guidance, run = arguments
    student, teachers = student_sizes(pair, model), teacher_sizes(pair)
    adapters = f", {student.trained:,} of them trained" * (student.trained < student.parameters)
    lines = [f"student    {model.student}: {student.parameters:,} parameters{adapters}"]
    for teacher, sizes in zip(pair.teachers, teachers, strict=True):
        lines.append(f"teacher    {teacher.name}: {sizes.parameters:,} parameters, frozen")
    if teachers and (run.dry_run or devices_of_a_machine() > 1):
        lines.append(_both_shardings(teachers, model, run))
    if pair.guide:
        lines += [f"teacher    {stored}" for stored in pair.guide.describe()]
    settings = ", ".join(f"{name} {value}" for name, value in guidance.in_effect().items())
    lines.append(f"guidance   {settings}")
    lines += [
        *plan.describe_corpus(documents.segments, blocks, pair.guide is not None),
        *(plan.describe_skipped(documents.held_out, "held out") if documents.held_out else ()),
        f"batch      {run.batch_arithmetic(data.max_length)}",
        f"steps      {_steps(data, run, documents, blocks)}, learning rate {run.learning_rate:g}",
        *plan.describe_memory(device_memory(student, teachers, arguments)),
        f"output     {run.output_dir}",
    ]
    return "\n".join(lines)


def device_memory(
    student: memory.Sizes, teachers: Sequence[memory.Sizes], arguments: config.Arguments
) -> dict[str, float]:
    """Bytes of a device by part, at its fullest."""
    model, data, _, run = arguments
    tokens = (run.per_device_train_batch_size or 1) * data.max_length
    parts = memory.student_memory(student, student_layout(run), tokens)
    devices = devices_of_the_jobs_machines() if model.teacher_sharding == "node" else 1
    return parts | teachers_memory(teachers, model, run, devices)


def student_layout(run: config.RunArguments) -> memory.Layout:
    """How the student is spread over devices and computes, as Trainer and Accelerate read it."""
    recomputes = any(getattr(run, f"{n}_checkpointing", False) for n in ("gradient", "activation"))
    accumulates = (run.gradient_accumulation_steps or 1) > 1
    is_sharded = bool(run.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not is_sharded:
        precision: memory.Precision = "mixed" if run.is_mixed else "float32"
        return memory.Layout(run.world_size, None, precision, recomputes, accumulates)
    given = getattr(run, "parallelism_config", None) or ParallelismConfig()  # by the environment
    plugin = FullyShardedDataParallelPlugin(**(getattr(run, "fsdp_plugin_args", None) or {}))
    return memory.Layout(
        devices=run.world_size,
        shards=given.dp_shard_size if given.dp_shard_size > 1 else run.world_size,
        precision="16 bits" if run.is_mixed else "float32",
        recomputes=recomputes or bool(plugin.activation_checkpointing),
        accumulates=accumulates,
        reshards=bool(plugin.reshard_after_forward),
    )


def teachers_memory(
    teachers: Sequence[memory.Sizes],
    model: config.ModelArguments,
    run: config.RunArguments,
    devices: int,
) -> dict[str, float]:
    """Bytes of a device by part, if the teachers are spread over so many."""
    width = 4 if teacher_dtype(model, run.device) == "float32" else 2
    total: dict[str, float] = {}
    for sizes in teachers:
        parts = memory.teacher_memory(sizes, width, model.teacher_quantization, devices)
        total = {name: total.get(name, 0.0) + size for name, size in parts.items()}
    return total


def devices_of_the_jobs_machines() -> int:
    """Processes of this machine; one alone plans for machines as they usually are."""
    return devices_of_a_machine() if devices_of_a_machine() > 1 else USUAL_MACHINE


def _both_shardings(
    teachers: Sequence[memory.Sizes], model: config.ModelArguments, run: config.RunArguments
) -> str:
    several = devices_of_the_jobs_machines()
    whole, shard = (
        sum(teachers_memory(teachers, model, run, devices).values()) / 2**30
        for devices in (1, several)
    )
    return (
        f"sharding   --teacher_sharding {model.teacher_sharding}; the teacher takes per device "
        f"{whole:.2f} GiB with none, {shard:.2f} GiB with node ({several} devices a machine)"
    )


def _steps(
    data: config.DataArguments, run: config.RunArguments, documents: Documents, blocks: Blocks
) -> str:
    read, total = len(documents.corpus), documents.total
    if run.max_steps > 0:
        return f"{run.max_steps:,}"
    if total is None:
        return "known when the whole corpus is read"
    steps_of_epoch = len(blocks) * data.max_length * total // (read * run.global_batch_tokens)
    steps = f"{math.ceil(run.num_train_epochs * steps_of_epoch):,}"
    note = f"about {steps} (extrapolated from {read:,} of {total:,} documents)"
    return steps if total == read else note


def example(pair: Pair, documents: Documents) -> str:
    """The first segment's first tokens, aligned."""
    if not (pair.guide and pair.guide.readers):
        return ""
    row = documents.segments.rows[0]
    text = documents.corpus[row["document"]][TEXT][row["start"] : row["end"]]
    reader = pair.guide.readers[0]
    return "\n".join(plan.aligned_example(text, pair.student_reader, reader))
