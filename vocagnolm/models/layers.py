"""Decoder layers of a model, and Liger's kernels in them."""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_liger_kernel_available

from vocagnolm.cli import json_settings

_LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


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


def liger_settings(given: Mapping[str, object] | str | None) -> dict[str, object]:
    """Make the `liger_kernel_config` that leaves the student's forward, and its losses, alone.

    Trainer applies Liger's kernels as training begins, behind `add_token_losses`. Its fused loss
    would put another forward in the place of the one that gives token losses; its other loss would
    replace `torch.nn.functional.cross_entropy` for the whole process. An option that is no JSON
    object, or asks for a loss, is a ValueError, as is a missing package.
    """
    settings = json_settings("--liger_kernel_config", given) if isinstance(given, str) else given
    settings = settings or {}
    # Off below; asking for one is an error rather than silently ignored.
    for name in _LIGER_LOSSES:
        if settings.get(name):
            raise ValueError(
                f"--liger_kernel_config: {name} would replace the weighted loss: leave it out"
            )
    if not is_liger_kernel_available():
        raise ValueError(
            "--use_liger_kernel needs a package that is not there: pip install liger-kernel"
        )
    return {**settings, **dict.fromkeys(_LIGER_LOSSES, False)}


def leave_teachers_alone(
    settings: Mapping[str, object], student: PreTrainedConfig, teachers: Sequence[PreTrainedConfig]
) -> dict[str, object]:
    """Turn Liger's rotary embedding off where a teacher would compute with it, too.

    It replaces a function of the module of a model's family, as training begins: behind the probes
    of the teachers.
    """
    shared = student.model_type in (teacher.model_type for teacher in teachers)
    return {**settings, "rope": False} if shared else dict(settings)
