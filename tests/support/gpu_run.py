"""A short run, on a GPU if there is one: alone, or as one of several processes over NCCL.

python -m torch.distributed.run --nproc_per_node 2 tests/support/gpu_run.py DIRECTORY fsdp|ddp
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from benchmarks.models import make_config, make_model, make_trainer, some_blocks

STEPS = 8
# Values of a log that depend neither on the clock nor on the machine.
REPEATED = "step loss grad_norm learning_rate student_loss_nats selected_fraction skipped_steps"
# Adam would hide a wrongly scaled gradient. In float32 only mistakes are large.
PLAIN = {"optim": "sgd", "learning_rate": 0.5, "bf16": False}


class Run(NamedTuple):
    """The unsharded weights at the end, the log, and the distance that the weights moved."""

    weights: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    way: float


def train(
    directory: Path,
    checkpoint: Path | None = None,
    dropout: float = 0.0,
    callbacks: Sequence[TrainerCallback] = (),
    fsdp: bool = False,
    **options: Any,
) -> Run:
    """Train a student with a teacher, from the beginning or from a checkpoint."""
    has_gpu = torch.cuda.is_available()
    scale, length = ("small", 1024) if has_gpu else ("tiny", 64)
    blocks = [
        {**block, "teacher_losses": [[] for _ in block["teacher_ids"]]}
        for block in some_blocks(scale, length, 40)
    ]
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    wide = {"initializer_range": 0.08}  # or all losses would be log(vocabulary)
    student = make_model(make_config("student", scale, attention_dropout=dropout, **wide), cpu)
    teacher = make_model(make_config("teacher", scale, **wide), cpu, torch.bfloat16)
    settings = {
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 2,
        "more": {"callbacks": [*callbacks]},
        "max_bad_steps": 1,
    }
    trainer = make_trainer(
        student,
        teacher,
        length,
        str(directory),
        on_cpu=not has_gpu,
        fsdp=fsdp,
        blocks=blocks,
        **settings | options,
    )
    start = {
        name: weight.detach().to(cpu, copy=True) for name, weight in student.named_parameters()
    }
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    weights = {}
    for name, parameter in trainer.model.named_parameters():
        whole: Any = parameter.full_tensor() if fsdp else parameter
        weights[name] = whole.detach().cpu()
    # The last entry sums up the whole run.
    entries = trainer.state.log_history[:-1]
    log = [{key: entry[key] for key in REPEATED.split() if key in entry} for entry in entries]
    return Run(weights, log, distance(weights, start))


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of all weights."""
    gaps = [(one[name] - weight).norm() for name, weight in other.items()]
    return float(torch.stack(gaps).norm())


def main() -> None:
    """Train as one of several processes, and let rank 0 save the outcome."""
    directory, layout = Path(sys.argv[1]), sys.argv[2]
    share = 4 // int(os.environ["WORLD_SIZE"])
    options = {"gradient_accumulation_steps": share, "fsdp": layout == "fsdp", **PLAIN}
    found = train(directory, **options)
    if torch.distributed.get_rank() == 0:
        torch.save(tuple(found), directory / "run.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
