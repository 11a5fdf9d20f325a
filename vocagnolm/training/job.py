"""A job: what its options name, what it rejects, and the settings that define its run."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import parse_flag_from_env

from vocagnolm.fields import OptionError, named, options_of, without_effect
from vocagnolm.method import Method, load_own
from vocagnolm.models.load import QUANTIZATIONS, quantization, weight_hashes
from vocagnolm.models.sharding import devices_of_a_machine
from vocagnolm.shell.extras import require
from vocagnolm.shell.io import log_main
from vocagnolm.store.format import manifest_of
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import DataOptions, ModelOptions


@dataclass(frozen=True)
class Job:
    """One training job, described by a command line or by a trainer's arguments in Python.

    In Python, the student and teachers in `model` may be loaded models, and `data` names no corpus.
    """

    model: ModelOptions
    data: DataOptions
    args: VocAgnoConfig
    # The recipe as --config names it.
    recipe: str | None = None
    # The paper's step is only the default, and no run has begun with one.
    may_lower_step: bool = False
    # Python may give a PEFT config instead of the options for adapters.
    peft_config: Any = None


def check_launch(job: Job, *, evaluates: bool) -> None:
    """Reject what would fail late, and warn about options without effect."""
    args = job.args
    # The package is loaded with the teacher. A plan may be made on a smaller machine than the
    # job's, but a user's config is read.
    quantized = args.teacher_quantization
    if quantized and quantized not in QUANTIZATIONS:
        quantization(quantized)
    elif quantized and not args.dry_run:
        require(QUANTIZATIONS[quantized], f"{named('teacher_quantization')} {quantized}")
    # A layer's weights are gathered only for its own forward pass. Whatever reads the output head
    # from outside would get a shard.
    if args.teacher_sharding == "node":
        if args.teacher_quantization or args.guidance.distance:
            raise OptionError(
                "teacher_sharding",
                f"is not supported with {named('teacher_quantization')}, or with {named('method')} "
                "kld or uld, which need the teacher's whole output head: leave it out",
            )
        if devices_of_a_machine() < 2 and not args.dry_run:
            raise OptionError("teacher_sharding", "node needs several processes on a machine")
    # FSDP may be set up by the arguments or by the launcher, which uses the environment.
    plugin = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    recomputes = parse_flag_from_env("FSDP_ACTIVATION_CHECKPOINTING")
    if job.model.use_peft and (recomputes or plugin.get("activation_checkpointing")):
        raise ValueError(
            f"fsdp_activation_checkpointing lets PEFT save no adapters ({named('use_peft')}): set "
            f"it to false and use {named('activation_checkpointing')}"
        )
    for line in options_without_effect(job, evaluates=evaluates):
        log_main(f"warning: {line}")


def options_without_effect(job: Job, *, evaluates: bool) -> Iterator[str]:
    """Yield a line for each option that has another value than its default and no effect."""
    classes = (ModelOptions, DataOptions, VocAgnoConfig)
    values: dict[str, object] = vars(job.args) | vars(job.data) | vars(job.model)
    values["eval_dataset"] = evaluates
    faults = dict(without_effect(values, options_of(*classes)))
    # A method reads only some of its settings.
    read = job.args.guidance.in_effect()
    for declared in options_of(Method):
        if declared.name not in read and values[declared.name] != declared.default:
            faults[declared.name] = f"with {job.args.guidance.as_typed}"
    for name in sorted(faults):
        yield f"{named(name)} has no effect {faults[name]}"


# -- Settings ------------------------------------------------------------------------------------


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that define a run. A checkpoint resumes only under the same settings.

    They do not include the number of processes, nor the batch size of each, unless tokens compete
    within it. `packed.settings_of_data` adds those of the documents.
    """
    settings: dict[str, Any] = {}
    for options in (job.model, job.data, job.args):
        for declared in options_of(options):
            value = getattr(options, declared.name)
            if declared.role == "place":
                # A run that is started from another directory is the same run.
                value = _absolute(value)
            if declared.role != "words":
                settings[declared.name] = value
    settings |= _model_hashes(job)
    hashes = _own_code(job.args.guidance)
    if hashes:
        settings["own_code_sha256"] = hashes
    if job.model.teacher_losses:
        settings["teacher_losses"] = _stores(job.model.teacher_losses)
    if job.peft_config is not None:
        settings["use_peft"] = True
        settings["peft_config"] = _described(job.peft_config)
    # A loaded model may bring its adapters.
    loaded = getattr(job.model.student, "peft_config", None) or {}
    if loaded:
        settings["adapters"] = {name: _described(config) for name, config in loaded.items()}
    # Such a method ranks or averages tokens within a micro-batch, so its size matters.
    if not job.args.guidance.splits_alike:
        settings["per_device_train_batch_size"] = job.args.per_device_train_batch_size
    return settings


def _model_hashes(job: Job) -> dict[str, Any]:
    """Identify local models that a run reads and does not save, because a path may get others."""
    hashes: dict[str, Any] = {}
    # In Python, a model may be loaded already.
    teachers = [name for name in job.model.teacher or [] if isinstance(name, str)]
    of_teachers = [weight_hashes(name) for name in teachers]
    # A finished run does not need its teacher's files any more.
    if any(of_teachers):
        hashes["teacher_hashes"] = of_teachers
    has_adapters = job.model.use_peft or job.peft_config is not None
    if has_adapters and isinstance(job.model.student, str):
        hashes["student_hashes"] = weight_hashes(job.model.student)
    return hashes


def _own_code(method: Method) -> list[str]:
    """Return hashes of the code that a user wrote, which may be edited before a run resumes."""
    hashes = []
    for option in ("method", "aggregation"):
        name = getattr(method, option)
        if ":" in name:
            # The code of some objects, such as those of compiled modules, cannot be read.
            with suppress(OSError, TypeError):
                code = inspect.getsource(load_own(option, name))
                hashes.append(hashlib.sha256(code.encode()).hexdigest())
    return hashes


def _stores(paths: Sequence[str]) -> list[dict[str, str]]:
    """Identify stores by their paths and by their teachers."""
    stores = []
    for path in paths:
        teacher = manifest_of(Path(path))["teacher"]
        stores.append({"store": str(Path(path).resolve()), "teacher": teacher})
    return stores


def _absolute(name: Any) -> Any:
    """Return the absolute path of a local model or file, because a path has many spellings.

    A list gives a list, and None stays None.
    """
    if name is None:
        return None
    if isinstance(name, list | tuple):
        return [_absolute(item) for item in name]
    if not isinstance(name, str | Path):
        # A loaded model. One that was made in memory has no name.
        name = str(name.config.name_or_path)
    return str(Path(name).resolve()) if name and Path(name).exists() else str(name)


def _described(peft_config: Any) -> dict[str, Any]:
    """Return a PEFT config's description of the adapters, with sets in a stable order."""
    settings = {}
    for name, value in peft_config.to_dict().items():
        # The run's own settings name the model, and a newer PEFT may resume the run.
        if name in ("base_model_name_or_path", "revision", "inference_mode", "peft_version"):
            continue
        # The order of a set differs between Python processes, and JSON has no sets.
        settings[name] = sorted(value) if isinstance(value, set | frozenset) else value
    return settings
