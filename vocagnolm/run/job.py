"""A resolved job: what the command line means, and what defines the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vocagnolm.cli import one_or_all
from vocagnolm.method import Method
from vocagnolm.run.config import RunArguments
from vocagnolm.run.options import DataOptions, LoadOptions, ModelOptions, PackOptions
from vocagnolm.store.format import manifest_of

# Names of options, with spaces between.
_RUN_IDENTITY = """
    global_batch_tokens num_train_epochs max_steps seed data_seed bf16 fp16 learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim adam_beta1 adam_beta2 adam_epsilon
    weight_decay max_grad_norm optim_args neftune_noise_alpha
"""
_LISTS = """
    teacher teacher_revision teacher_tokenizer teacher_chat_template dataset dataset_config
    dataset_split text_column
"""
_WITHOUT_EFFECT_ON_NUMBERS = """
    num_proc trust_remote_code eval_dataset save_store teacher_sharding
"""


@dataclass(frozen=True)
class Job:
    """One training job, as the command line, a recipe and the launcher say it."""

    model: ModelOptions
    load: LoadOptions
    data: DataOptions
    pack: PackOptions
    method: Method
    run: RunArguments
    # As --config names it.
    recipe: str | None = None

    @cached_property
    def settings(self) -> dict[str, object]:
        """Settings that define the run: a checkpoint may be resumed only under the same.

        The number of processes is not among them, and neither is the batch of each, unless tokens
        compete within it.
        """
        model, method = self.model, self.method
        values = asdict(model) | asdict(self.load) | asdict(self.data)
        values |= asdict(self.pack) | asdict(method)
        for name in _WITHOUT_EFFECT_ON_NUMBERS.split():
            values.pop(name, None)
        values["student"] = _one_name(values["student"])
        values |= _without_single_lists(values)
        if model.teacher_losses:
            values["teacher_losses"] = [
                {"store": str(Path(path).resolve()), "teacher": manifest_of(Path(path))["teacher"]}
                for path in model.teacher_losses
            ]
        names = _RUN_IDENTITY.split()
        if not method.splits_alike:
            names.append("per_device_train_batch_size")
        run = vars(self.run)
        return values | {name: run[name] for name in names}


def default_settings() -> dict[str, object]:
    """Return the defaults of options, for those that did not exist when a run was started."""
    values = vars(ModelOptions()) | vars(LoadOptions()) | vars(DataOptions())
    values |= vars(PackOptions()) | vars(Method())
    return values | _without_single_lists(values)


def _without_single_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has several values, a single one as in runs that are older than several."""
    found = {}
    for name in _LISTS.split():
        if given := [_one_name(value) for value in values[name] or ()]:
            found[name] = one_or_all(given)
    return found


def _one_name(name: str) -> str:
    """Return the absolute path of a directory, which has many names; other names as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name
