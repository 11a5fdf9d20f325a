"""Read a checkpoint under another layout than it was saved under, without a change to a number.

Under one process or DDP every process holds the whole student, and a checkpoint is whole files;
under FSDP2 each holds a part of every tensor, and a checkpoint is PyTorch's, in shards with an
index. transformers reads either kind under its own layout only.

    saved        read into     weights                      optimizer
    whole        sharded       this process's part of each  parameters matched by their order,
    in shards    whole         in place, shard by shard     which Trainer makes alike under both

The index of a sharded checkpoint is a pickle, of which only PyTorch's own records are read.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PosixPath
from pickle import Unpickler, UnpicklingError
from typing import Any, NoReturn, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import is_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.serialization import _get_layout

# Accelerate's names for the directories in a sharded checkpoint, and the key of all inside.
MODEL, OPTIMIZER = "model", "optimizer"
_DIRECTORIES = {MODEL: "pytorch_model_fsdp_0", OPTIMIZER: "optimizer_0"}
_OPTIMIZER_FILE = "optimizer.pt"
_GATHERED_FILE = "pytorch_model_fsdp.bin"  # of FULL_STATE_DICT
_WEIGHT_FILES = "*model*.safetensors"  # of a student, in one file or several, or of adapters
_INDEX = ".metadata"
# All that an index may name: records, types and places; a layout is looked up by its name.
_RECORDS: dict[tuple[str, str], object] = {
    **{("torch", name): x for name, x in vars(torch).items() if isinstance(x, torch.dtype)},
    **{(metadata.__name__, name): getattr(metadata, name) for name in metadata.__all__},
    **{(x.__module__, x.__name__): x for x in (_StorageInfo, _get_layout, torch.Size)},
    (metadata.__name__, "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    **dict.fromkeys([(name, "PosixPath") for name in ("pathlib", "pathlib._local")], PosixPath),
}

# State dicts nest tensors, numbers and lists, as an optimizer or a model likes.
StateDict = dict[Any, Any]


class LayoutError(ValueError):
    """A checkpoint cannot be resumed under this layout."""


def is_sharded(checkpoint: Path) -> bool:
    """Test whether a checkpoint holds shards, and not whole files."""
    return (checkpoint / _DIRECTORIES[MODEL]).is_dir()


def is_of_another_layout(checkpoint: Path, sharded: bool) -> bool:
    """Test whether a checkpoint's layout differs from the student's, which FSDP shards or not.

    One that FSDP has saved in a third way, and that it no longer shards, is a `LayoutError`.
    """
    if not (checkpoint / _GATHERED_FILE).exists():
        return is_sharded(checkpoint) != sharded
    if sharded:
        return False
    raise LayoutError(
        f"{checkpoint} was saved by FSDP with fsdp_state_dict_type FULL_STATE_DICT and can go "
        "on only so: expected SHARDED_STATE_DICT, as in accelerate_configs"
    )


def change_of_layout(checkpoint: Path, sharded: bool) -> str | None:
    """Describe the effects of a change of layout, if there is one and it is possible."""
    if not is_of_another_layout(checkpoint, sharded):
        return None
    before, now = ("whole", "sharded") if sharded else ("sharded", "whole")
    return (
        f"{checkpoint} was saved {before} and goes on {now}: weights, optimizer, schedule and data "
        "go on as they were, and sums over processes are rounded in another order"
    )


# -- Weights -----------------------------------------------------------------------------------


@torch.no_grad()
def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """Read the student's weights, or its adapters', in place, from a checkpoint of another layout.

    Raises:
        LayoutError: the names or shapes in the checkpoint are not the model's, or FSDP1 shards it.
        OSError: a shard is missing or damaged.
    """
    weights, shapes, sharded = _weights(model), _shapes(checkpoint), is_sharded(checkpoint)
    if not sharded and not any(isinstance(weight, DTensor) for weight in weights.values()):
        raise LayoutError(
            f"{checkpoint} was saved whole, with which FSDP goes on in its second version only: "
            "set fsdp_version: 2, as in accelerate_configs"
        )
    _check(checkpoint, shapes, weights)
    if sharded:
        # Straight into the weights' own memory: no second copy of the model.
        state = {f"{MODEL}.{name}": weights[name].detach() for name in shapes}
        _load(checkpoint / _DIRECTORIES[MODEL], state)
        return
    for path in sorted(checkpoint.glob(_WEIGHT_FILES)):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                weights[name].copy_(_laid_out(file.get_tensor(name), weights[name]))


def _shapes(checkpoint: Path) -> dict[str, Sequence[int]]:
    """Shapes of all saved weights by name; their content is not read."""
    if is_sharded(checkpoint):
        return {
            name.removeprefix(f"{MODEL}."): shard.size
            for name, shard in _index(checkpoint / _DIRECTORIES[MODEL]).state_dict_metadata.items()
            if isinstance(shard, TensorStorageMetadata)
        }
    shapes: dict[str, Sequence[int]] = {}
    for path in checkpoint.glob(_WEIGHT_FILES):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    return shapes


def shape_fault(checkpoint: Path, model: nn.Module) -> str | None:
    """Describe a weight that has another shape in a checkpoint than in the student, if any has."""
    weights = _weights(model)
    for name, shape in _shapes(checkpoint).items():
        if name in weights and weights[name].shape != torch.Size(shape):
            ours = list(weights[name].shape)
            return f"{name} has the shape {list(shape)} there and {ours} in the student"
    return None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights by their names in a checkpoint; a tied weight is one object of two names."""
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


# -- The optimizer -----------------------------------------------------------------------------


def load_optimizer(checkpoint: Path, optimizer: Optimizer) -> None:
    """Read the optimizer's state, laid out as its parameters are now.

    Raises:
        LayoutError: it is no optimizer of PyTorch's, or one whose state is not per element.
        OSError: a shard is missing or damaged.
    """
    own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer

    def refuse() -> NoReturn:
        raise LayoutError(
            f"{checkpoint} cannot go on under another layout with the state of "
            f"{type(own).__name__}: go on under the layout that it was saved under"
        )

    # The tensors of another package's optimizer may not be one number per element.
    if not type(own).__module__.startswith("torch.optim"):
        refuse()
    saved = _optimizer_state(checkpoint)
    groups, own_groups = saved["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in groups] != [len(g["params"]) for g in own_groups]:
        refuse()
    names = [name for group in groups for name in group["params"]]
    parameters = [parameter for group in own_groups for parameter in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = saved["state"].get(name, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                continue
            if value.ndim and value.shape != parameter.shape:
                refuse()
            # A count of steps is copied too, or the whole file would stay open for it.
            state[key] = _laid_out(value, parameter) if value.ndim else value.clone()
    optimizer.load_state_dict(saved)


def _optimizer_state(checkpoint: Path) -> StateDict:
    """As the optimizer's own `state_dict()`, but parameters may have names instead of numbers."""
    if not is_sharded(checkpoint):
        path = checkpoint / _OPTIMIZER_FILE
        return cast(StateDict, torch.load(path, "cpu", weights_only=True, mmap=True))
    found = read_sharded(checkpoint, OPTIMIZER)
    # There is no `state` if the optimizer keeps none; lists came as dictionaries.
    groups = found["param_groups"]
    return {"state": found.get("state", {}), "param_groups": [groups[i] for i in sorted(groups)]}


def _laid_out(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor, or this process's part of it, as another of the same shape is laid out."""
    if not isinstance(like, DTensor):
        return whole
    # Every process has read the same: nothing need be sent.
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


# -- PyTorch's distributed checkpoints, read by one process alone --------------------------------


def read_sharded(checkpoint: Path, which: str) -> StateDict:
    """Read all that was saved of `MODEL` or `OPTIMIZER`, nested as it was, with whole tensors.

    Lists come as dictionaries of their indices. A damaged or missing shard is an OSError.
    """
    directory = checkpoint / _DIRECTORIES[which]
    index = _index(directory)
    state = {
        name: torch.empty(shard.size, dtype=shard.properties.dtype)
        if isinstance(shard, TensorStorageMetadata)
        else None
        for name, shard in index.state_dict_metadata.items()
    }
    _load(directory, state)
    # The flat "optimizer.state.w.step" lies at the path ("optimizer", "state", "w", "step").
    nested: StateDict = {}
    for name, value in state.items():
        *path, last = index.planner_data[name]
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    return cast(StateDict, nested[which])


class _IndexUnpickler(Unpickler):
    """Makes the records of an index; whatever else a pickle names is not even imported."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _RECORDS:
            raise UnpicklingError(f"an index has no {module}.{name}")
        return _RECORDS[module, name]


def check_indices(checkpoint: Path) -> None:
    """Read the indices of a sharded checkpoint; an OSError where one is more than records.

    PyTorch would run what it is made of.
    """
    for directory in (checkpoint / name for name in _DIRECTORIES.values()):
        if (directory / _INDEX).exists():
            _index(directory)


def _index(directory: Path) -> Metadata:
    path = directory / _INDEX
    try:
        with path.open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise UnpicklingError(f"found a {type(found).__name__}")
    # What is crafted may end in any error.
    except Exception as error:
        raise OSError(f"{path} is no index of shards ({error}): take another checkpoint") from error
    return found


def _load(directory: Path, state: StateDict) -> None:
    try:
        with warnings.catch_warnings():
            # One process alone reads, on purpose.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    except (CheckpointException, UnpicklingError, EOFError, OSError) as error:
        raise OSError(f"{directory} is damaged: take another checkpoint") from error
