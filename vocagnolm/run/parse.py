"""Which options of training go together."""

import os
from collections.abc import Iterator

from transformers.training_args import ParallelMode

from vocagnolm.cli import one_for_each
from vocagnolm.host.options import raise_first
from vocagnolm.models.quantization import QUANTIZATIONS, quantization
from vocagnolm.models.sharding import require_several_devices
from vocagnolm.row_segments import needs_segments
from vocagnolm.run.config import RunArguments
from vocagnolm.run.job import Job


def check_together(job: Job) -> None:
    """Raise a ValueError for options that do not go together."""
    _check_teachers(job)
    raise_first(_faults(job))


def _check_teachers(job: Job) -> None:
    """Reject the lack of a teacher, or one of the wrong kind or number."""
    model, method = job.model, job.method
    teachers = model.teacher or model.teacher_losses or []
    if method.needs_teacher and not teachers:
        raise ValueError(
            "--teacher is required: name the causal LM that guides the student, or a store of its "
            "losses with --teacher_losses"
        )
    method.check_teacher(len(teachers), is_stored=bool(model.teacher_losses))
    method.check_chunks(job.pack.max_length)


def _faults(job: Job) -> Iterator[str]:
    """Yield a message for options that do not go together, or cannot be met here."""
    model, run, guided_by = job.model, job.run, f"--method {job.method.method}"
    teachers = model.teacher or model.teacher_losses or []
    is_distilled = job.method.method in ("kld", "uld")
    # Raises for another number of them.
    one_for_each("teacher_chat_template", job.pack.teacher_chat_template, len(teachers), "teachers")
    for name in ("teacher_tokenizer", "teacher_revision"):
        if (given := vars(model)[name]) and len(given) != len(teachers):
            yield f"--{name} needs one value for each of {len(teachers)} teachers, got {len(given)}"
    if len(teachers) > 1 and model.save_store:
        yield f"--save_store takes one teacher, got {len(teachers)}: name one with --teacher"
    if model.save_store and is_distilled:
        yield f"--save_store keeps token losses, which {guided_by} does not compute: leave it out"
    if model.save_store and job.pack.attend_across_documents:
        yield "--save_store keeps losses of documents alone: leave --attend_across_documents out"
    yield from _faults_of_weights(job)
    if run.fsdp and run.parallel_mode != ParallelMode.DISTRIBUTED and not run.dry_run:
        yield "--fsdp shards over several processes: start them with accelerate launch or torchrun"
    if model.use_peft:
        yield from _faults_of_recomputation(run)


def _faults_of_weights(job: Job) -> Iterator[str]:
    """Yield a message for ways to hold weights that are not there, or do not go together."""
    load, run, guided_by = job.load, job.run, f"--method {job.method.method}"
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = run.dry_run and load.teacher_quantization in QUANTIZATIONS
    if load.teacher_quantization and not is_planned:
        # Raises for a quantization that cannot be made here.
        quantization(load.teacher_quantization)
    if load.teacher_sharding != "none":
        sharded = f"--teacher_sharding {load.teacher_sharding}"
        if load.teacher_quantization:
            yield f"--teacher_quantization does not go with {sharded}: leave one of them out"
        if job.method.method in ("kld", "uld"):
            yield (
                f"{sharded} does not go with {guided_by}, which needs the teacher's whole output "
                "head: leave it out"
            )
        if not run.dry_run:
            require_several_devices()
    # 32 bits where the attention has 16 only.
    if run.device.type == "cuda" and needs_segments(load.attn_implementation):
        narrow = f"--attn_implementation {load.attn_implementation} computes in 16 bits on a GPU"
        instead = "or --attn_implementation sdpa"
        if not run.is_mixed:
            yield f"{narrow}, but the student computes in float32: use --bf16 true, {instead}"
        if load.teacher_dtype == "float32":
            yield f"{narrow}, but --teacher_dtype is float32: use --teacher_dtype auto, {instead}"


def _faults_of_recomputation(run: RunArguments) -> Iterator[str]:
    """Yield a message for ways of recomputing layers that leave adapters untrained or unsaved."""
    # Transformers is about to rename the option: one of the two may be absent.
    for name in ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"):
        if (vars(run).get(name) or {}).get("use_reentrant"):
            yield (
                f"--{name}: use_reentrant does not go with --use_peft, because what enters the "
                "first layer has no gradient: leave it out"
            )
    plugin = run.fsdp_config if isinstance(run.fsdp_config, dict) else {}
    in_environment = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true"
    if plugin.get("activation_checkpointing") or in_environment:
        yield (
            "fsdp_activation_checkpointing does not go with --use_peft, because PEFT would save no "
            "adapters: set it to false and use --gradient_checkpointing"
        )
