"""What FSDP has saved in pieces, read by one process alone: PyTorch's distributed checkpoints.

Their index, a pickle, is read as PyTorch always does: read checkpoints of your own only.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

# What Accelerate calls the directories in a checkpoint, and the key of all that is inside.
MODEL, OPTIMIZER = "model", "optimizer"
_DIRECTORIES = {MODEL: "pytorch_model_fsdp_0", OPTIMIZER: "optimizer_0"}


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint holds pieces, and not whole files."""
    return (checkpoint / _DIRECTORIES[MODEL]).is_dir()


def shapes_of_weights(checkpoint: Path) -> dict[str, torch.Size]:
    """The names and whole shapes of the weights in a checkpoint.

    Raises:
        OSError: the index is missing or damaged.
    """
    found = _index(checkpoint / _DIRECTORIES[MODEL]).state_dict_metadata
    return {
        name.removeprefix(f"{MODEL}."): piece.size
        for name, piece in found.items()
        if isinstance(piece, TensorStorageMetadata)
    }


def read_weights_into(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    """Read weights in place, without a copy of all of them.

    Args:
        checkpoint: that holds them.
        weights: by name, in their whole shapes; changed.

    Raises:
        OSError: a piece is missing or damaged.
    """
    state = {f"{MODEL}.{name}": weight.detach() for name, weight in weights.items()}
    _load(checkpoint / _DIRECTORIES[MODEL], state)


def read_sharded(checkpoint: Path, which: str) -> dict[Any, Any]:
    """All that was saved of `MODEL` or `OPTIMIZER`, nested as it was; tensors come whole.

    Lists come as dictionaries of their indices.

    Raises:
        OSError: a piece is missing or damaged.
    """
    directory = checkpoint / _DIRECTORIES[which]
    index = _index(directory)
    state = {
        name: torch.empty(piece.size, dtype=piece.properties.dtype)
        if isinstance(piece, TensorStorageMetadata)
        else None
        for name, piece in index.state_dict_metadata.items()
    }
    _load(directory, state)
    nested: dict[Any, Any] = {}
    for name, value in state.items():
        *path, last = index.planner_data[name]
        place = nested
        for key in path:
            place = place.setdefault(key, {})
        place[last] = value
    found: dict[Any, Any] = nested[which]
    return found


def _index(directory: Path) -> Metadata:
    try:
        return FileSystemReader(directory).read_metadata()
    except (UnpicklingError, EOFError, OSError) as error:
        raise _damaged(directory) from error


def _load(directory: Path, state: dict[str, Any]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
            load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    except (CheckpointException, UnpicklingError, EOFError, OSError) as error:
        raise _damaged(directory) from error


def _damaged(directory: Path) -> OSError:
    return OSError(f"{directory} is damaged: take another checkpoint")
