"""A run: `train` with its guard and its logs, checkpoints, and the same run resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from benchmarks.gpu_first.report import Report, timed
from benchmarks.models import make_config, make_model, make_trainer, some_blocks

SPOILED = 2  # the step whose gradient is spoilt
# Of a log: what a resumed run has to repeat; the rest depends on the clock.
_REPEATED = ("step", "loss", "grad_norm", "learning_rate", "student_loss_nats", "selected_fraction")
Log = list[dict[str, float]]


class _Spoiler(TrainerCallback):
    """Puts a NaN into one gradient, before the guard looks."""

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        if state.global_step == SPOILED:
            next(p for p in kwargs["model"].parameters() if p.grad is not None).grad.mul_(torch.nan)


def train_and_resume(report: Report) -> None:
    """Train, train again, resume, and skip a step whose gradient is a NaN."""
    steps, half = _steps(report), _steps(report) // 2
    first, second, spoiled = (report.scratch() for _ in range(3))
    weights, logs, seconds = _run(report, first)
    layout = "FSDP2, 1 process" if report.fsdp else "1 device"
    files = sorted(os.listdir(f"{first}/checkpoint-{half}"))
    report.say(f"{steps} steps, s", seconds, layout=layout, files=files)
    for entry in logs[:-1]:  # the last one is of the whole run
        report.say("log of step", entry["step"], **entry)
    again = {
        "the same run again": (second, None),
        f"resumed from step {half}": (first, f"{first}/checkpoint-{half}"),
    }
    for name, (directory, checkpoint) in again.items():
        with report.trial(name):
            found, its_logs, its_seconds = _run(report, directory, checkpoint)
            gap = max(float((found[n] - w).abs().max()) for n, w in weights.items())
            more = {"logs_equal": _repeated(its_logs) == _repeated(logs), "s": its_seconds}
            report.say(f"{name}: largest difference of a weight", gap, **more)
    if not report.fsdp:
        with report.trial("a step with a NaN"):
            _, its_logs, _ = _run(report, spoiled, callbacks=[_Spoiler()], max_bad_steps=1)
            skipped = sum(entry.get("skipped_steps", 0.0) for entry in its_logs)
            report.say("a step with a NaN: steps skipped", skipped)


def _steps(report: Report) -> int:
    return 4 if report.is_tiny else 20


def _run(
    report: Report, directory: str, checkpoint: str | None = None, **more: Any
) -> tuple[dict[str, torch.Tensor], Log, float]:
    """Train; return the weights, the log and the seconds."""
    scale, length = ("tiny", 64) if report.is_tiny else ("small", 1024)
    steps = _steps(report)
    blocks = [
        {**block, "teacher_losses": [[] for _ in block["teacher_ids"]]}
        for block in some_blocks(scale, length, 48)
    ]
    torch.manual_seed(0)
    trainer = make_trainer(
        make_model(make_config("student", scale), report.device),
        make_model(make_config("teacher", scale), report.device, torch.bfloat16),
        length,
        directory,
        on_cpu=report.device.type == "cpu",
        fsdp=report.fsdp,
        blocks=blocks,
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
    weights = {}
    for name, parameter in trainer.model.named_parameters():
        whole: Any = parameter
        if hasattr(whole, "full_tensor"):
            whole = whole.full_tensor()
        weights[name] = whole.detach().float().cpu()
    return weights, trainer.state.log_history, seconds


def _repeated(logs: Log) -> Log:
    return [{key: entry[key] for key in _REPEATED if key in entry} for entry in logs]


def train_sharded(report: Report) -> None:
    """Do the same under FSDP2, in a process that is given what `torchrun` with one gives."""
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
