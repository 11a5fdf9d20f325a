"""The first of many processes on the fake device, as a file of `accelerate_configs/` starts it.

The others do not exist: PyTorch's fake process group takes every message and brings none. DDP does
not work so, as its reducer reads memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from fake_cuda import FakeTensor, Watch, outside
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from vocagnolm.shell import dist

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"


def start_first(config: str) -> None:
    """Make this process the first that `accelerate launch --config_file CONFIG` starts."""
    given = ["--config_file", str(CONFIGS / f"{config}.yaml"), "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(given))
    world, of_machine = arguments.num_processes, arguments.num_processes // arguments.num_machines
    torchrun = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": of_machine}
    os.environ |= prepare_multi_gpu_env(arguments)
    os.environ |= {name: str(value) for name, value in torchrun.items()}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    state: Any = PartialState
    state._prepare_backend = lambda *_, **__: ("fake", DistributedType.MULTI_GPU)
    # The first process needs no copy of what it decides.
    dist._patient_group = lambda group: group
    torch.distributed.broadcast_object_list = lambda *_, **__: None
    _compute_places()
    _count_gathered()


def _compute_places() -> None:
    """Find the place of a process in a mesh with real numbers."""
    mesh: Any = device_mesh.DeviceMesh
    for name in ("__init__", "__getitem__", "_flatten", "__eq__", "__hash__", "get_coordinate"):
        if name in vars(mesh):
            setattr(mesh, name, outside(getattr(mesh, name)))
    _replace(device_mesh.init_device_mesh, outside(device_mesh.init_device_mesh))


def _count_gathered() -> None:
    """Tell the watch when FSDP2 frees a tensor's memory; it sees allocations by itself."""
    fake: Any = FakeTensor
    fake.data_ptr = lambda tensor: tensor.untyped_storage()._cdata
    take = _fsdp_param.free_storage

    def taken(tensor: Any) -> None:
        Watch.active.forget(tensor)
        take(tensor)

    _replace(take, taken)


def _replace(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """Replace a function in all modules that have imported it."""
    for module in list(sys.modules.values()):
        if vars(module).get(function.__name__) is function:
            setattr(module, function.__name__, by)
