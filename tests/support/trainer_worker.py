"""One of several gloo processes: runs jobs of tests and saves the student's parameters."""

from __future__ import annotations

import copy
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from fork_server import serve
from methods_world import World
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, AutoTokenizer

from vocagnolm.models.sharding import shard_inside_machine
from vocagnolm.objective import OnlineTeacher
from vocagnolm.run import weighing


def run_job(directory: Path, number: int, job: dict) -> None:
    world_size, where = int(os.environ["WORLD_SIZE"]), directory / job.get("models", "")
    tokenizers = [
        AutoTokenizer.from_pretrained(job[f"{role}_tokenizer"]) for role in ("student", "teacher")
    ]
    models = [
        AutoModelForCausalLM.from_pretrained(where / role, dtype=torch.float64)
        for role in ("student", "teacher", "reference")
    ]
    texts = json.loads((directory / "texts.json").read_text())
    sharding: dict[str, Any] = {}
    if job["fsdp"]:
        sharding = {"fsdp": True, "fsdp_config": {"version": 2}}
    if job.get("replicas"):
        size = world_size // job["replicas"]
        sharding["parallelism_config"] = ParallelismConfig(
            dp_replicate_size=job["replicas"], dp_shard_size=size
        )
    training = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // world_size,
        "use_cpu": not job["fsdp"],
        **job["training"],
        **sharding,
    }
    out = directory / f"out{number}"
    world = World(texts, tokenizers, models)
    world.weights = job.get("weights")
    trainer = world.trainer(out, job["method"], **training)
    for machines in job.get("machines", ()):
        check_sharded_teacher(trainer, machines)
    assert trainer.accelerator.num_processes == world_size
    assert (trainer.accelerator.distributed_type == DistributedType.FSDP) == job["fsdp"]
    trainer.train()
    if job["training"].get("torch_compile"):
        assert counters["stats"]["unique_graphs"], "nothing was compiled"
        assert not counters["graph_break"], counters["graph_break"]
        assert all("_orig_mod" not in name for name in trainer.model.state_dict())
    if job["training"].get("bf16"):
        losses = trainer._student_losses(
            trainer.model_wrapped, next(iter(trainer.get_train_dataloader()))
        )
        assert not torch.equal(losses, losses.bfloat16().float()), "losses are rounded to bfloat16"
        policy = trainer.model_wrapped._get_fsdp_state()._mp_policy
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if job["method"] == "vocagnolm":
        state["eval_loss"] = torch.tensor(trainer.evaluate(trainer.train_dataset)["eval_loss"])
    if trainer.accelerator.is_main_process:
        torch.save(state, directory / f"{number}.pt")


def check_sharded_teacher(trainer: Any, machines: int) -> None:
    """Check that a teacher sharded inside each machine gives a whole one's losses, bit for bit."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    (whole,), cpu = trainer.online_teachers, torch.device("cpu")
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size // machines)
    sharded = shard_inside_machine(copy.deepcopy(whole), cpu)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    # Each process has rows of another shape.
    batch = trainer.data_collator([trainer.train_dataset[n] for n in range(rank + 1)])
    expected, found = (OnlineTeacher([each], cpu).losses(batch)[0] for each in (whole, sharded))
    assert torch.equal(expected, found)
    parts: Any = sharded.parameters()
    share = sum(p.to_local().numel() for p in parts) / sum(p.numel() for p in whole.parameters())
    assert abs(share * world_size / machines - 1) < 0.1, share
    units = sum(isinstance(module, FSDPModule) for module in sharded.modules())
    assert units == len(whole.model.layers) + 1, "more than a layer is gathered at a time"


def fsdp_environment(path: str) -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file` gives its processes."""
    settings = yaml.safe_load(Path(path).read_text())["fsdp_config"]
    environment = {name.upper(): str(value) for name, value in settings.items()}
    return {"ACCELERATE_USE_FSDP": "true", **environment}


def run(request: dict[str, Any]) -> int:
    """Run the jobs of a directory."""
    directory = Path(request["directory"])
    jobs = json.loads((directory / "jobs.json").read_text())
    for number, job in enumerate(jobs):
        if job["fsdp"]:
            # Force Accelerate's real FSDP2 path on a CPU, where it would fall back to DDP.
            os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
            PartialState._reset_state()
            transformers.training_args.is_torch_bf16_gpu_available = lambda: True
            PartialState._prepare_backend = lambda self, *a, **k: (
                "gloo",
                DistributedType.MULTI_GPU,
            )
        if "argv" in job:
            weighing.SHARD_SEQUENCES = 8
            if job["fsdp"]:
                os.environ |= fsdp_environment(job["accelerate_config"])
            assert import_module(job.get("command", "vocagnolm.run.parser")).main(job["argv"]) == 0
        else:
            run_job(directory, number, job)
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    serve(run)
