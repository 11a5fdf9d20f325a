"""The command line and recipes of `train.py`, and which options go together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from vocagnolm.models.quantization import QUANTIZATIONS, quantization
from vocagnolm.models.sharding import require_several_devices
from vocagnolm.row_segments import needs_segments
from vocagnolm.run.arguments import DataArguments, GuidanceArguments, ModelArguments
from vocagnolm.run.job import Job
from vocagnolm.run.training_arguments import RunArguments

_OF_A_TEACHER = (
    "teacher_tokenizer",
    "teacher_revision",
    "teacher_quantization",
    "teacher_sharding",
)
# As argparse reads them: of any type.
_Options = dict[str, Any]


class _Parser(HfArgumentParser):
    """Argument parser whose errors are one line: the usage of TrainingArguments fills screens."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str]) -> Job:
    """Read the command line; `--config FILE.yaml` gives values that flags override.

    Raises:
        ValueError: an argument is wrong, in one line.
    """
    types: list[Any] = [ModelArguments, DataArguments, GuidanceArguments, RunArguments]
    parser = _Parser(
        types,
        prog="train.py",
        allow_abbrev=False,
        description="Train a student with the token losses of a teacher (arXiv 2503.19123).",
    )
    # A recipe becomes flags before the flags of the command line, so that those win.
    parser.add_argument("--config", help="YAML file of options; flags override it.")
    first = _Parser((), add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    config = first.parse_known_args(argv)[0].config
    values = vars(parser.parse_args([*(read_recipe(config) if config else ()), *argv]))
    del values["config"]
    if not values["output_dir"]:
        values["output_dir"] = _default_output_dir(values)
    _set_evaluation(values)
    try:
        job = Job(*parser.parse_dict(values))
    except (OSError, ImportError, ValueError) as error:  # a file or package may be missing
        raise ValueError(" ".join(str(error).split())) from error
    _check_together(job.model, job.data, job.method)
    _check_teachers_weights(job)
    _check_precision(job.model, job.run)
    if job.model.use_peft:
        _check_recomputation(job.run)
    job.run.set_batch(job.data.max_length)
    return job


def read_recipe(path: str) -> list[str]:
    """Read a YAML mapping as the flags that it stands for, so that one parser checks both."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--config {path} cannot be read: {reason}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"--config {path} must be a mapping of options to values")
    if "config" in recipe:
        raise ValueError(f"--config {path} names another config: give one recipe")
    flags: list[str] = []
    for name, value in recipe.items():
        if isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return flags


def _default_output_dir(values: _Options) -> str:
    names = [values["student"], *(values["teacher"] or values["teacher_losses"] or ())]
    if values["method"] != "vocagnolm" or len(names) == 1:
        names.append(values["method"])
    return os.path.join("runs", "__".join(Path(name).name for name in names))


def _set_evaluation(values: _Options) -> None:
    """Evaluate where there is something to evaluate on, as often as checkpoints are saved."""
    evaluates = bool(values["eval_fraction"] or values["eval_dataset"])
    strategy = values["eval_strategy"]
    if strategy not in (None, "no") and not evaluates:
        raise ValueError("--eval_strategy needs --eval_fraction or --eval_dataset")
    if strategy is None and evaluates:
        values["eval_strategy"] = strategy = "steps"
    if strategy == "steps":
        values["eval_steps"] = values["eval_steps"] or values["save_steps"]


def _check_together(
    model: ModelArguments, data: DataArguments, guidance: GuidanceArguments
) -> None:
    if not guidance.needs_teacher:
        why = f"with {guidance.as_typed}"
        _refuse(model, why, *_OF_A_TEACHER, "teacher", "teacher_losses", "teacher_dtype")
    elif model.teacher_losses:
        why = "with --teacher_losses, which no teacher is loaded for"
        _refuse(model, why, *_OF_A_TEACHER, "teacher", "teacher_dtype")
    elif not model.teacher:
        raise ValueError(
            "--teacher is required: name the causal LM that guides the student, or a store of its "
            "losses with --teacher_losses"
        )
    _check_teachers(model, guidance)
    if not model.teacher:
        _refuse(model, "without --teacher", "save_store")
    elif model.save_store and data.attend_across_documents:
        raise ValueError(
            "--save_store keeps losses of documents alone: leave --attend_across_documents out"
        )
    if not model.save_store:
        _refuse(model, "without --save_store", "store_dtype")
    if not model.teacher_losses:
        _refuse(data, "without --teacher_losses", "missing_losses")


def _check_precision(model: ModelArguments, run: RunArguments) -> None:
    """Reject 32 bits where the attention has 16 only."""
    if run.device.type != "cuda" or not needs_segments(model.attn_implementation):
        return
    for is_wide, found, instead in (
        (not run.is_mixed, "the student computes in float32", "--bf16 true"),
        (model.teacher_dtype == "float32", "--teacher_dtype is float32", "--teacher_dtype auto"),
    ):
        if is_wide:
            raise ValueError(
                f"--attn_implementation {model.attn_implementation} computes in 16 bits on a GPU, "
                f"but {found}: use {instead}, or --attn_implementation sdpa"
            )


def _check_recomputation(run: RunArguments) -> None:
    """Reject ways of recomputing layers that leave adapters untrained or unsaved."""
    # Transformers is about to rename the option.
    for name in ("gradient", "activation"):
        kwargs = getattr(run, f"{name}_checkpointing_kwargs", None)
        if not isinstance(kwargs, dict) or not kwargs.get("use_reentrant"):
            continue
        raise ValueError(
            f"--{name}_checkpointing_kwargs: use_reentrant does not go with --use_peft, because "
            "what enters the first layer has no gradient: leave it out"
        )
    plugin = run.fsdp_config if isinstance(run.fsdp_config, dict) else {}
    in_environment = os.environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() == "true"
    if plugin.get("activation_checkpointing") or in_environment:
        raise ValueError(
            "fsdp_activation_checkpointing does not go with --use_peft, because PEFT would save no "
            "adapters: set it to false and use --gradient_checkpointing"
        )


def _check_teachers(model: ModelArguments, guidance: GuidanceArguments) -> None:
    """Reject a wrong number of teachers, and teachers of the wrong kind."""
    teachers = model.teacher or model.teacher_losses or []
    if len(teachers) < 2:
        _refuse(guidance, "without several teachers", "teacher_reduction", "teacher_weights")
    guidance.check_teachers(max(len(teachers), 1))
    for name in ("teacher_tokenizer", "teacher_revision"):
        given = vars(model)[name]
        if given and len(given) != len(teachers):
            raise ValueError(
                f"--{name} needs one value for each of {len(teachers)} teachers, got {len(given)}"
            )
    if guidance.compares_distributions and model.teacher_losses:
        raise ValueError(
            f"--method {guidance.method} compares distributions over words, which a store of "
            "losses does not hold: give the model itself with --teacher"
        )
    if len(teachers) > 1 and (guidance.compares_distributions or model.save_store):
        what = "--save_store" if model.save_store else f"--method {guidance.method}"
        raise ValueError(f"{what} takes one teacher, got {len(teachers)}: name one with --teacher")
    if model.save_store and guidance.method in ("kld", "uld"):
        raise ValueError(
            f"--save_store keeps token losses, which --method {guidance.method} does not compute: "
            "leave it out"
        )


def _check_teachers_weights(job: Job) -> None:
    """Reject ways to hold the teachers' weights that are not there, or do not go together."""
    model, run = job.model, job.run
    # A plan may be made on a smaller machine than the job will run on.
    is_planned = run.dry_run and model.teacher_quantization in QUANTIZATIONS
    if model.teacher_quantization and not is_planned:
        # Raises for a quantization that cannot be made here.
        quantization(model.teacher_quantization)
    for name in ("teacher_quantization", "compile_layers"):
        if vars(model)[name] and model.teacher_sharding != "none":
            raise ValueError(
                f"--{name} does not go with --teacher_sharding {model.teacher_sharding}: leave one "
                "of them out"
            )
    if job.method.method in ("kld", "uld") and model.teacher_sharding != "none":
        raise ValueError(
            f"--teacher_sharding {model.teacher_sharding} does not go with --method "
            f"{job.method.method}, which needs the teacher's whole output head: leave it out"
        )
    if model.teacher_sharding == "node" and not run.dry_run:
        require_several_devices()


def _refuse(
    arguments: ModelArguments | DataArguments | GuidanceArguments, why: str, *names: str
) -> None:
    """Reject options that have no effect."""
    defaults = {option.name: option.default for option in fields(arguments)}
    for name in names:
        if vars(arguments)[name] != defaults[name]:
            raise ValueError(f"--{name} has no effect {why}: leave it out")
