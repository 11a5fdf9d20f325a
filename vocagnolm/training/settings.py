"""The settings that define a run: a checkpoint is resumed only under the same."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vocagnolm.fields import listed
from vocagnolm.packing import Blocks
from vocagnolm.store.format import manifest_of
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions

# Settings of a run beside those of the model, the data and the method.
RUN_SETTINGS = (
    "global_batch_tokens num_train_epochs max_steps seed data_seed bf16 fp16 learning_rate "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim adam_beta1 adam_beta2 adam_epsilon "
    "weight_decay max_grad_norm optim_args neftune_noise_alpha"
).split()
NO_EFFECT_ON_NUMBERS = "dataset_num_proc trust_remote_code eval_dataset teacher_sharding".split()
_PLACES = (
    "student teacher student_tokenizer teacher_tokenizer student_chat_template "
    "teacher_chat_template dataset"
).split()


@dataclass(frozen=True)
class Job:
    """One training job, as the command line, a recipe and the launcher describe it."""

    model: ModelOptions
    data: DataOptions
    args: VocAgnoConfig
    # As --config names it.
    recipe: str | None = None


def settings_of(job: Job) -> dict[str, Any]:
    """Return the settings that define a run: a checkpoint may be resumed only under the same.

    The number of processes is not among them, and neither is the batch of each, unless tokens
    compete within it.
    """
    found = asdict(job.model) | asdict(job.data)
    names = (*(each.name for each in fields(GuidanceOptions)), *RUN_SETTINGS)
    found |= {name: getattr(job.args, name) for name in names}
    for name in NO_EFFECT_ON_NUMBERS:
        del found[name]
    for name in _PLACES:
        # A file or directory has many names, and one absolute path.
        places = [
            str(Path(place).resolve()) if Path(place).exists() else place
            for place in listed(found[name] or [])
        ]
        if found[name]:
            found[name] = places if isinstance(found[name], list) else places[0]
    if job.model.teacher_losses:
        found["teacher_losses"] = [
            {"store": str(Path(path).resolve()), "teacher": manifest_of(Path(path))["teacher"]}
            for path in job.model.teacher_losses
        ]
    if not job.args.splits_alike:
        found["per_device_train_batch_size"] = job.args.per_device_train_batch_size
    return found


def settings_in_python(
    args: VocAgnoConfig, student: Any, teachers: Any, dataset: Any
) -> dict[str, Any]:
    """Return the settings of a run that Python has begun, under the names of `job.settings_of`."""
    names = (*(each.name for each in fields(GuidanceOptions)), *RUN_SETTINGS)
    found = {name: getattr(args, name) for name in names if name not in NO_EFFECT_ON_NUMBERS}
    places = [
        str(model.config.name_or_path)
        for model in (student, *(teachers if isinstance(teachers, Sequence) else ()))
    ]
    places = [
        str(Path(place).resolve()) if place and Path(place).exists() else place for place in places
    ]
    found["student"], found["teacher"] = places[0], places[1:] or None
    if isinstance(dataset, Blocks):
        found["blocks"] = len(dataset)
    if not args.splits_alike:
        found["per_device_train_batch_size"] = args.per_device_train_batch_size
    return found
