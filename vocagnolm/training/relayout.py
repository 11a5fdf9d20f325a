"""A checkpoint that goes on under another layout than it was saved under.

Under one process or DDP every process holds the whole student, and a checkpoint is whole files;
under FSDP2 each holds a part of every tensor, and a checkpoint is pieces. transformers reads either
kind under its own layout only. Here one is read under the other, without a change to a number: the
weights in place, tensor by tensor, and the optimizer's state by the order of its parameters, which
Trainer makes alike under both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vocagnolm.training import pieces

_OPTIMIZER_FILE = "optimizer.pt"
_GATHERED_FILE = "pytorch_model_fsdp.bin"  # of FULL_STATE_DICT
_WEIGHT_FILES = "*model*.safetensors"  # of a student, in one file or several, or of adapters


class LayoutError(ValueError):
    """A checkpoint cannot go on under this layout."""


def is_of_another_layout(checkpoint: Path, sharded: bool) -> bool:
    """Whether a checkpoint was saved whole and goes on sharded, or the other way round.

    Args:
        checkpoint: where it lies.
        sharded: whether FSDP shards the student now.

    Raises:
        LayoutError: FSDP has saved it in a third way, and does not go on with it.
    """
    if (checkpoint / _GATHERED_FILE).exists():
        if sharded:
            return False
        raise LayoutError(
            f"{checkpoint} was saved by FSDP with fsdp_state_dict_type FULL_STATE_DICT and can go "
            "on only so: expected SHARDED_STATE_DICT, as in accelerate_configs"
        )
    return pieces.is_sharded(checkpoint) != sharded


def change_of_layout(checkpoint: Path, sharded: bool) -> str | None:
    """What it changes that a checkpoint goes on under another layout, if it does.

    Raises:
        LayoutError: it cannot.
    """
    if not is_of_another_layout(checkpoint, sharded):
        return None
    before, now = ("whole", "sharded") if sharded else ("sharded", "whole")
    return (
        f"{checkpoint} was saved {before} and goes on {now}: weights, optimizer, schedule and data "
        "go on as they were, and sums over processes are rounded in another order"
    )


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Read the student's weights, or those of its adapters, from a checkpoint of another layout.

    Args:
        checkpoint: that holds them.
        model: changed in place; sharded by FSDP2 already, or not at all.

    Raises:
        LayoutError: the names or shapes in the checkpoint are not the model's, or FSDP1 shards it.
    """
    weights = _weights(model)
    if pieces.is_sharded(checkpoint):
        shapes = pieces.shapes_of_weights(checkpoint)
        _check(checkpoint, shapes, weights)
        pieces.read_weights_into(checkpoint, {name: weights[name] for name in shapes})
        return
    if not any(isinstance(weight, DTensor) for weight in weights.values()):
        raise LayoutError(
            f"{checkpoint} was saved whole, with which FSDP goes on in its second version only: "
            "set fsdp_version: 2, as in accelerate_configs"
        )
    with ExitStack() as files:
        opened = [
            files.enter_context(safe_open(path, framework="pt"))
            for path in sorted(checkpoint.glob(_WEIGHT_FILES))
        ]
        saved = {name: file.get_slice(name) for file in opened for name in sorted(file.keys())}
        _check(checkpoint, {name: part.get_shape() for name, part in saved.items()}, weights)
        for name, part in saved.items():
            weights[name].copy_(_laid_out(part[...], weights[name]))


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds, under its names there; a tied weight is one object of two names."""
    state = model.state_dict(keep_vars=True)
    if not is_peft_model(model):
        return state
    from peft import get_peft_model_state_dict

    adapters: dict[str, Tensor] = get_peft_model_state_dict(model, state_dict=state)
    return adapters


def _check(
    checkpoint: Path, shapes: Mapping[str, Sequence[int]], weights: Mapping[str, Tensor]
) -> None:
    """See that every weight is in the checkpoint, under one of its names, and nothing else is."""
    wrong = [
        name
        for name, shape in shapes.items()
        if name not in weights or weights[name].shape != torch.Size(shape)
    ]
    given = {id(weights[name]) for name in shapes if name in weights}
    wrong += [name for name, weight in weights.items() if id(weight) not in given]
    if wrong:
        raise LayoutError(
            f"{checkpoint} cannot go on under another layout: {len(wrong)} of its weights are "
            f"missing, too many or of another shape than the student's, such as {wrong[0]}: "
            "go on under the layout that it was saved under"
        )


def load_optimizer(checkpoint: Path, optimizer: Any) -> None:
    """Read the optimizer's state from a checkpoint of another layout.

    Args:
        checkpoint: that holds it.
        optimizer: with the parameters of the model as it is laid out now; may be Accelerate's.

    Raises:
        LayoutError: it is no optimizer of PyTorch's, or one whose state is not per element.
    """
    kind = type(getattr(optimizer, "optimizer", optimizer))
    refusal = LayoutError(
        f"{checkpoint} cannot go on under another layout with the state of {kind.__name__}: go on "
        "under the layout that it was saved under"
    )
    if not kind.__module__.startswith("torch.optim"):  # tensors may be more than they look like
        raise refusal
    saved = _optimizer_state(checkpoint)
    sizes, expected = (
        [len(group["params"]) for group in groups]
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if sizes != expected:
        raise refusal
    names = [name for group in saved["param_groups"] for name in group["params"]]
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = saved["state"].get(name, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim and value.shape != parameter.shape:
                raise refusal
            # A count of steps is copied too, or the whole file would stay open for it.
            state[key] = _laid_out(value, parameter) if value.ndim else value.clone()
    optimizer.load_state_dict(saved)


def _optimizer_state(checkpoint: Path) -> dict[str, Any]:
    """As the optimizer's own `state_dict()`, but parameters may have names instead of numbers."""
    if not pieces.is_sharded(checkpoint):
        path = checkpoint / _OPTIMIZER_FILE
        found: dict[str, Any] = torch.load(path, "cpu", weights_only=True, mmap=True)
        return found
    found = pieces.read_sharded(checkpoint, pieces.OPTIMIZER)
    groups = found["param_groups"]  # without `state`, if the optimizer keeps none
    return {"state": found.get("state", {}), "param_groups": [groups[i] for i in sorted(groups)]}


def _laid_out(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor, or this process's part of it, as another of the same shape is laid out."""
    if not isinstance(like, DTensor):
        return whole
    # every process has read the same: nothing need be sent
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
