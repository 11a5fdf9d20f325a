"""Decoder layers that run faster with the same numbers: compiled, or with Liger's kernels.

What each of them changes, and which tokens are selected then, is measured in docs/speed.md.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_liger_kernel_available

from vocagnolm.cli import json_settings

# Graphs of a layer's code: of student and teacher, with and without gradient, for the first shape
# and for any. Beyond PyTorch's limit of 8 a layer would silently run uncompiled.
_GRAPHS_OF_A_LAYER = 32
_LIGER_LOSSES = ("fused_linear_cross_entropy", "cross_entropy")


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers that repeat, as a model names those that must not be split."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} names no decoder layers (_no_split_modules), which are "
            "compiled or sharded one by one: leave --compile_layers and --teacher_sharding out"
        )
    return layers


def compile_layers(
    model: PreTrainedModel, backend: str = "inductor", dynamic: bool | None = None
) -> int:
    """Compile every decoder layer of a causal language model, in place, when it first runs.

    Never the whole model: `transformers` would then build a mask for every batch, and the losses
    choose rows at run time. Layers of a kind share their graphs. Parameters keep their names.
    Call it behind `add_token_losses` and `check_packing`, whose probes would be compiled too, and
    before DDP or FSDP2 wrap the model. By default a second shape makes all later ones free. Returns
    the number of layers.
    """
    layers = decoder_layers(model)
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _GRAPHS_OF_A_LAYER)
    for layer in layers:
        layer.compile(backend=backend, dynamic=dynamic)
    return len(layers)


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
    of the teachers. Asking for it beside a teacher of the student's family is a ValueError.
    """
    if student.model_type not in (teacher.model_type for teacher in teachers):
        return dict(settings)
    if settings.get("rope"):
        raise ValueError(
            f"--liger_kernel_config: rope would reach the teacher, a {student.model_type} model as "
            "the student is: leave it out"
        )
    return {**settings, "rope": False}
