"""A run: `train` with its guard and its logs, checkpoints, and the same run resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from benchmarks.gpu_first.models import (
    make_config,
    make_model,
    make_trainer,
    some_blocks,
    temporary_directory,
)
from benchmarks.gpu_first.report import Report, timed
from vocagnolm.run.throughput import TIMING_KEYS

# The number of a step whose gradient is spoilt.
SPOILED = 2
Run = tuple[dict[str, torch.Tensor], list[dict[str, float]], float]


class _Spoiler(TrainerCallback):
    """Puts a NaN into one gradient, before the guard looks."""

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        if state.global_step == SPOILED:
            next(p for p in kwargs["model"].parameters() if p.grad is not None).grad.mul_(torch.nan)


def train_and_resume(report: Report) -> None:
    """Train, train again, resume, overlap the teacher, and skip a step whose gradient is a NaN."""
    steps, half = _steps(report), _steps(report) // 2
    first, second, third, spoiled = (temporary_directory(report) for _ in range(4))
    weights, logs, seconds = _run(report, first)
    layout = "FSDP2, 1 process" if report.fsdp else "1 device"
    files = sorted(os.listdir(f"{first}/checkpoint-{half}"))
    report.say(f"{steps} steps, s", seconds, layout=layout, files=files)
    for entry in logs[:-1]:  # the last one is of the whole run
        rates = {key: entry[key] for key in TIMING_KEYS if key in entry}
        loss = {key: entry[key] for key in ("loss", "grad_norm")}
        report.say("log of step", entry["step"], **loss, **rates)
    again: dict[str, tuple[str, str | None, bool]] = {"the same run again": (second, None, False)}
    again[f"resumed from step {half}"] = (first, f"{first}/checkpoint-{half}", False)
    again["with --overlap_teacher"] = (third, None, True)
    for name, (directory, checkpoint, overlaps) in again.items():
        with report.trial(name):
            run = _run(report, directory, checkpoint, overlap_teacher=overlaps)
            found, its_logs, its_seconds = run
            gap = max(float((found[n] - w).abs().max()) for n, w in weights.items())
            is_equal = _without_times(its_logs) == _without_times(logs)
            more = {"logs_equal": is_equal, "s": its_seconds}
            report.say(f"{name}: largest difference of a weight", gap, **more)
    if not report.fsdp:
        with report.trial("a step with a NaN"):
            _, its_logs, _ = _run(report, spoiled, callbacks=[_Spoiler()], max_bad_steps=1)
            skipped = sum(entry.get("skipped_steps", 0.0) for entry in its_logs)
            aside = sorted(x.name for x in (Path(spoiled) / "bad_steps").iterdir())
            report.say("a step with a NaN: steps skipped", skipped, aside=aside)


def _steps(report: Report) -> int:
    return 4 if report.is_tiny else 20


def _run(report: Report, directory: str, checkpoint: str | None = None, **more: Any) -> Run:
    scale, length = ("tiny", 64) if report.is_tiny else ("small", 1024)
    steps = _steps(report)
    blocks = [
        {**block, "teacher_losses": [[] for _ in block["teacher_ids"]]}
        for block in some_blocks(scale, length, 48)
    ]
    torch.manual_seed(0)
    trainer = make_trainer(
        report,
        make_model(make_config("student", scale), report.device),
        make_model(make_config("teacher", scale), report.device, torch.bfloat16),
        length,
        blocks=blocks,
        output_dir=directory,
        max_steps=steps,
        save_steps=steps // 2,
        logging_steps=steps // 4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        warmup_steps=2,
        more=more,
    )
    seconds, _ = timed(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    named = trainer.model.named_parameters()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named}
    weights = {n: p.detach().float().cpu() for n, p in whole.items()}
    return weights, trainer.state.log_history, seconds


def _without_times(logs: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: x for key, x in entry.items() if key not in TIMING_KEYS} for entry in logs]


def train_sharded(report: Report) -> None:
    """Do the same under FSDP2, in a process that is told what `torchrun` with one tells."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # The host's name may have no address.
    alone |= {"MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    scale = "tiny" if report.is_tiny else "real"
    command = [sys.executable, "-m", "benchmarks.gpu_first", "--scale", scale, "--fsdp"]
    command += ["--output_dir", str(report.output_dir), "--stages", "training"]
    minutes = max(report.minutes_left, 1.0)
    command += ["--minutes", str(minutes)]
    done = subprocess.run(command, timeout=60 * minutes, env={**os.environ, **alone}, check=False)
    report.say("exit status", done.returncode)
