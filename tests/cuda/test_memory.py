"""The plan of a run against the peak of its tensors, at the paper's sizes, and the waits of shards.

TinyLlama 1.1B with AdamW, and Qwen2.5-Math-7B in 16 bits; two micro-batches of 8 rows of 2,048
tokens. With a configuration of `accelerate_configs/` only rank 0 runs: PyTorch's fake process group
takes every message and brings none. DDP is left to arithmetic, as its reducer reads memory: it
reduces 4 bytes a parameter once a step, in buckets that take as much memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from fake_cuda import FakeTensor, Watch, outside
from fake_run import Step, check_step, make_run, one_step, planned
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from vocagnolm.method import Method
from vocagnolm.shell import dist

VARLEN = "torch_varlen"
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


def step_and_plan(config: str, attention: str, options: dict[str, Any]) -> tuple[Step, float]:
    """Take a step, as the first process of a configuration; return it and the planned bytes."""
    if config:
        start_first(config)
    with Watch() as watch:
        trainer = make_run(Method(), attention, "full", 8, **options)
        plan = planned(trainer)
        return one_step(watch, trainer), plan


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "attention", "options"),
    [
        ("", VARLEN, {}),
        ("", "sdpa", {}),
        ("", VARLEN, {"gradient_checkpointing": True}),
        ("", VARLEN, {"lora": True}),
        ("fsdp2", VARLEN, {}),
        ("fsdp2_32xh100", VARLEN, {"teacher_sharding": "node"}),
        ("hsdp_32xh100", VARLEN, {}),
    ],
)
def test_step_takes_what_the_plan_says(
    config: str,
    attention: str,
    options: dict[str, Any],
    on_fake_cuda: Callable[..., tuple[Step, float]],
) -> None:
    step, plan = on_fake_cuda(step_and_plan, config, attention, options)
    assert plan == pytest.approx(step.peak, rel=0.03)
    check_step(step, attention)
