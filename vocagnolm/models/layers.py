"""Decoder layers of a model, and Liger's kernels in them."""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that repeat, as a model names those that must not be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), which "
            "--teacher_sharding shards one by one: leave it out"
        )
    return layers


def leave_teachers_alone(
    settings: Mapping[str, object], student: PreTrainedConfig, teachers: Sequence[PreTrainedConfig]
) -> dict[str, object]:
    """Turn Liger's rotary embedding off where a teacher would compute with it, too.

    It replaces a function of the module of a model's family, as training begins: behind the probes
    of the teachers.
    """
    shared = student.model_type in (teacher.model_type for teacher in teachers)
    return {**settings, "rope": False} if shared else dict(settings)
