"""The command line and recipes of `train.py`, and which options go together."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser
from transformers.training_args import ParallelMode

from vocagnolm.cli import OneLineErrors, one_for_each
from vocagnolm.host.options import raise_first, refuse_idle
from vocagnolm.models.quantization import QUANTIZATIONS, quantization
from vocagnolm.models.sharding import require_several_devices
from vocagnolm.row_segments import needs_segments
from vocagnolm.run.arguments import DataArguments, GuidanceArguments, ModelArguments
from vocagnolm.run.job import Job
from vocagnolm.run.overlap import overlap_faults
from vocagnolm.run.recipe import Options, named_in_errors, recipe_of
from vocagnolm.run.training_arguments import RunArguments
from vocagnolm.teacher import StoredTeacher


class _Parser(OneLineErrors, HfArgumentParser):
    """Parser of dataclasses; the usage of TrainingArguments would fill screens."""


def parse(argv: Sequence[str]) -> Job:
    """Read the command line; `--config FILE.yaml` gives values that flags override.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    parser = make_parser()
    # A recipe becomes flags before the flags of the command line, so that those win.
    recipe = recipe_of(argv)
    recipe.check(parser)
    values = vars(parser.parse_args([*recipe.flags(), *argv]))
    with named_in_errors(argv):
        return _job(parser, values)


def make_parser() -> HfArgumentParser:
    """Make the parser of all options, with the fields of `TrainingArguments`."""
    types: list[Any] = [ModelArguments, DataArguments, GuidanceArguments, RunArguments]
    parser = _Parser(types, prog="train.py", allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    return parser


def _job(parser: HfArgumentParser, values: Options) -> Job:
    """Resolve what depends on several options, and reject those that do not go together."""
    config = values.pop("config")
    if not values["output_dir"]:
        values["output_dir"] = _default_output_dir(values)
    _set_evaluation(values)
    try:
        model, data, method, run = parser.parse_dict(values)
        job = Job(model, data, method, run, recipe=config)
    # A file or package may be missing, a number too large for the machine.
    except (OSError, ImportError, ValueError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    _check_idle(job)
    raise_first(_faults(job))
    job.run.set_batch(job.data.max_length)
    return job


def _default_output_dir(values: Options) -> str:
    names = [values["student"], *(values["teacher"] or values["teacher_losses"] or ())]
    if values["method"] != "vocagnolm" or len(names) == 1:
        names.append(values["method"])
    return os.path.join("runs", "__".join(Path(name).name for name in names))


def _set_evaluation(values: Options) -> None:
    """Evaluate where there is something to evaluate on, as often as checkpoints are saved."""
    evaluates = bool(values["eval_fraction"] or values["eval_dataset"])
    strategy = values["eval_strategy"]
    if strategy not in (None, "no") and not evaluates:
        raise ValueError("--eval_strategy needs --eval_fraction or --eval_dataset")
    if strategy is None and evaluates:
        values["eval_strategy"] = strategy = "steps"
    if strategy == "steps":
        values["eval_steps"] = values["eval_steps"] or values["save_steps"]


def _check_idle(job: Job) -> None:
    """Reject options that have no effect beside the others."""
    model, method = job.model, job.method
    teachers = model.teacher or model.teacher_losses or []
    if method.needs_teacher and not teachers:
        raise ValueError(
            "--teacher is required: name the causal LM that guides the student, or a store of its "
            "losses with --teacher_losses"
        )
    of_a_teacher = (
        "teacher teacher_tokenizer teacher_revision teacher_dtype teacher_quantization "
        "teacher_sharding teacher_chat_template overlap_teacher"
    )
    stored = "with --teacher_losses, which no teacher is loaded for"
    # From the general to the particular: the first row that holds tells why.
    parts = [(part, option) for part in (model, job.data, method) for option in fields(part)]
    given = {option.name for part, option in parts if vars(part)[option.name] != option.default}
    for is_idle, names, condition in (
        (not method.needs_teacher, f"{of_a_teacher} teacher_losses", f"with {method.as_typed}"),
        (model.teacher_losses, of_a_teacher, stored),
        (len(teachers) < 2, "teacher_reduction teacher_weights", "without several teachers"),
        (method.method == "kld", "teacher_chat_template", f"with {method.as_typed}"),
        (method.choice != "guided", "overlap_teacher", f"with {method.as_typed}"),
        (not model.teacher, "save_store", "without --teacher"),
        (not model.save_store, "store_dtype", "without --save_store"),
        (not model.teacher_losses, "missing_losses", "without --teacher_losses"),
        (len(job.data.dataset) < 2, "dataset_weights", "with one --dataset"),
    ):
        if is_idle:
            refuse_idle(given, names.split(), condition)
    scored = StoredTeacher(len(teachers)) if model.teacher_losses else None
    method.check_teacher(scored or teachers or None)
    method.check_chunks(job.data.max_length)


def _faults(job: Job) -> Iterator[str]:
    """Yield a message for options that do not go together, or cannot be met here."""
    model, run, guided_by = job.model, job.run, f"--method {job.method.method}"
    teachers = model.teacher or model.teacher_losses or []
    is_distilled = job.method.method in ("kld", "uld")
    # Raises for another number of them.
    one_for_each("teacher_chat_template", model.teacher_chat_template, len(teachers), "teachers")
    for name in ("teacher_tokenizer", "teacher_revision"):
        if (given := vars(model)[name]) and len(given) != len(teachers):
            yield f"--{name} needs one value for each of {len(teachers)} teachers, got {len(given)}"
    if len(teachers) > 1 and model.save_store:
        yield f"--save_store takes one teacher, got {len(teachers)}: name one with --teacher"
    if model.save_store and is_distilled:
        yield f"--save_store keeps token losses, which {guided_by} does not compute: leave it out"
    if model.save_store and job.data.attend_across_documents:
        yield "--save_store keeps losses of documents alone: leave --attend_across_documents out"
    yield from _faults_of_weights(job)
    if model.overlap_teacher:
        device = "cuda" if run.dry_run else run.device.type
        yield from overlap_faults(True, model.teacher_sharding != "none", device)
    if run.fsdp and run.parallel_mode != ParallelMode.DISTRIBUTED and not run.dry_run:
        yield "--fsdp shards over several processes: start them with accelerate launch or torchrun"
    if model.use_peft:
        yield from _faults_of_recomputation(run)


def _faults_of_weights(job: Job) -> Iterator[str]:
    """Yield a message for ways to hold weights that are not there, or do not go together."""
    model, run, guided_by = job.model, job.run, f"--method {job.method.method}"
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = run.dry_run and model.teacher_quantization in QUANTIZATIONS
    if model.teacher_quantization and not is_planned:
        # Raises for a quantization that cannot be made here.
        quantization(model.teacher_quantization)
    if model.teacher_sharding != "none":
        sharded = f"--teacher_sharding {model.teacher_sharding}"
        for name in ("teacher_quantization", "compile_layers"):
            if vars(model)[name]:
                yield f"--{name} does not go with {sharded}: leave one of them out"
        if job.method.method in ("kld", "uld"):
            yield (
                f"{sharded} does not go with {guided_by}, which needs the teacher's whole output "
                "head: leave it out"
            )
        if not run.dry_run:
            require_several_devices()
    # 32 bits where the attention has 16 only.
    if run.device.type == "cuda" and needs_segments(model.attn_implementation):
        narrow = f"--attn_implementation {model.attn_implementation} computes in 16 bits on a GPU"
        instead = "or --attn_implementation sdpa"
        if not run.is_mixed:
            yield f"{narrow}, but the student computes in float32: use --bf16 true, {instead}"
        if model.teacher_dtype == "float32":
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
