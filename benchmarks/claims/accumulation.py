"""Take one optimizer step on the same documents as 1, 2 and 4 micro-batches, with ours and TRL's.

Whole training runs of one step: the loss and the gradient norm that are logged. The value is the
largest relative change in ours; the trainers of TRL are shown beside it.
"""

from __future__ import annotations

import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PrinterCallback

from benchmarks.harness import Claim, Measured, alone
from benchmarks.peers import OURS, WAYS, Job, Size, prepare

CLAIM = Claim(
    "loss and gradient norm are the same however a batch is split", at_most=1e-5, unit="relative"
)
DOCUMENTS = 4
SPLITS = (1, 2, 4)
FULL = Size(lengths="80 120 200 240", max_length=256, hidden=64, layers=2, turns=1)
SMALL = Size.trained(4000, lengths="40 60 80 100", max_length=128, hidden=64, layers=2, turns=1)
TINY = replace(Size.tiny(), lengths="20 25 30 35")


def measure(size: Size) -> Measured:
    """Return the largest relative change of a loss or a gradient norm of ours."""
    return alone(take_steps, size)  # processes that other claims fork have run no backward pass


def take_steps(size: Size) -> Measured:
    """Take a step of every trainer in every split."""
    datasets.disable_progress_bars()
    worst, details = 0.0, []
    with tempfile.TemporaryDirectory() as directory:
        prepare(size, Path(directory))
        job = Job(size, Path(directory))
        # Documents of different lengths, a row of each trainer's for each.
        job.turns = [turn[:1] for turn in job.turns[:DOCUMENTS]]
        for way in WAYS:
            first, *others = (one_step(job, way, split) for split in SPLITS)
            factors = [tuple(b / a for a, b in zip(first, other, strict=True)) for other in others]
            shown = ", ".join(f"x{loss:.4f} and x{norm:.4f}" for loss, norm in factors)
            details.append(f"{way:10} loss {first[0]:.6f}, gradient {first[1]:.6f}; {shown}")
            if way in OURS:
                worst = max(worst, *(abs(factor - 1) for pair in factors for factor in pair))
    return Measured(worst, tuple(details))


def one_step(job: Job, way: str, split: int) -> tuple[float, float]:
    """The logged loss and gradient norm of a step in `split` micro-batches."""
    make = job.ours if way in OURS else job.theirs
    options: dict[str, Any] = {
        "per_device_train_batch_size": DOCUMENTS // split,
        "gradient_accumulation_steps": split,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-9,
        "max_grad_norm": 1e9,  # no clipping
    }
    trainer = make(way, **options)
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    with redirect_stdout(StringIO()):  # its lines
        trainer.train()
    log = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    return float(log["loss"]), float(log["grad_norm"])
