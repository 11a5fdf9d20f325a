"""What a process holds before an optimizer step, beside what the plan of its run says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from vocagnolm.run import train
from vocagnolm.run.plan import device_memory

STUDENT = "student with AdamW"


def local_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of this process's parts; a tensor that is there twice counts once."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


class Held(TrainerCallback):
    """Keeps the bytes of weights, gradients and optimizer state once all are there."""

    def __init__(self, trainer: Any, path: Path, planned: dict[str, float]):
        self.trainer, self.path, self.planned = trainer, path, planned

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        parameters = list(self.trainer.model_wrapped.parameters())
        states = self.trainer.optimizer.state.values()
        moments = [t for kept in states for t in kept.values() if isinstance(t, torch.Tensor)]
        teachers = getattr(self.trainer.objective.teacher, "models", ())
        held = {
            STUDENT: local_bytes([*parameters, *(p.grad for p in parameters), *moments]),
            "teacher": local_bytes(p for teacher in teachers for p in teacher.parameters()),
        }
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps({"held": held, "planned": self.planned}))


def measure_runs() -> None:
    """Let every run of `train.py` in this process write `held-RANK.json` into its directory."""
    own = train.make_trainer

    def measured(job: Any, models: Any, documents: Any) -> Any:
        trainer = own(job, models, documents)
        path = Path(job.args.output_dir) / f"held-{job.args.process_index}.json"
        trainer.add_callback(Held(trainer, path, device_memory(job, models)))
        return trainer

    train.make_trainer = measured


def held_of(run: Path, rank: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    """What a run held, and what its plan said."""
    found = json.loads((run / f"held-{rank}.json").read_text())
    return found["held"], found["planned"]
