"""Callbacks that stop a run before a NaN reaches the weights, and the recorder's interface."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.training import bad_batch
from vocagnolm.training.bad_batch import StepBatches
from vocagnolm.training.resumable import ResumableTrainer

logger = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """What keeps the teacher's losses of a run."""

    def add(self, block_B: Tensor, loss_BT: Tensor) -> None:
        """Take the losses of a micro-batch of a kept step, in nats, and its blocks' numbers."""
        raise NotImplementedError

    def write(self, step: int) -> None:
        """Have all that was taken on the disk: a checkpoint of this step follows."""
        raise NotImplementedError


class StepGuard(TrainerCallback):
    """Starts the step's clock, and lets no update be made that rests on a NaN.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. One in the gradient would be saved with the student.
    The check costs one wait for the device per optimizer step, none per micro-batch; in the same
    reduction the processes learn whether one of them was asked to stop.

    Args:
        trainer: whose steps are watched.
        step_batches: the micro-batches of the step and their losses.
        recorder: keeps the teacher's losses of steps that made an update.
        max_bad_steps: how many steps in a row are skipped; one more stops the run, after the
            student's last good state is saved.
    """

    def __init__(
        self,
        trainer: ResumableTrainer,
        step_batches: StepBatches,
        recorder: Recorder | None,
        max_bad_steps: int,
    ):
        self._trainer, self._max_bad_steps = trainer, max_bad_steps
        self._step_batches, self._recorder = step_batches, recorder

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of the metrics."""
        self._trainer.metrics.start()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skip the update, or stop, if a loss or a gradient is not finite on any process."""
        trainer = self._trainer
        trainer.phases.begin("agreement")
        mine = torch.cat([trainer.metrics.bad_blocks, self._gradient_fault()[None]])
        asked = torch.full((1,), int(trainer.preemption.is_asked), device=mine.device)
        *worst, is_asked = trainer.reduce_max(torch.cat([mine, asked])).tolist()
        trainer.preemption.is_agreed |= bool(is_asked)
        if max(worst) < 0:
            trainer.metrics.keep_step()
            if self._recorder is not None:
                for found in self._step_batches.teacher_losses():
                    self._recorder.add(*found)
        else:
            self._skip_or_stop(state.global_step + 1, worst, mine.tolist())
        trainer.phases.begin("update")

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        """End the update."""
        self._trainer.phases.begin("other")

    def _gradient_fault(self) -> Tensor:
        """0 if this process's gradients are not finite, else -1; waits for nothing."""
        parameters = _student(self._trainer).parameters()
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        if not gradients or self._trainer.accelerator.scaler is not None:
            # float16's scaler meets infinities as a matter of course, and skips the step itself.
            return torch.full((), -1, device=self._trainer.args.device)
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        return is_finite.long().neg().to(self._trainer.args.device)  # offloaded gradients are not

    def _skip_or_stop(self, step: int, worst: list[int], mine: list[int]) -> None:
        """Make no update, with all processes alike; `worst` is what the worst of them found."""
        trainer = self._trainer
        what, advice = _diagnosis(worst)
        path = self._write_aside(step, worst, mine, what)
        if trainer.metrics.bad_steps >= self._max_bad_steps:
            saved = trainer.save_progress()
            state = f"the state before it is in {saved}" if saved else "and none before"
            raise NonFiniteLoss(
                f"step {step}: {what}; no update was made, {state}; {advice}; "
                f"the batch is in {path}"
            )
        trainer.metrics.drop_step()
        for parameter in _student(trainer).parameters():
            parameter.grad = None  # which an optimizer passes over, its own state too
        if trainer.is_world_process_zero():
            logger.warning(
                "step %d: %s; no update was made (%d in a row, --max_bad_steps %d); the batch is "
                "in %s",
                *(step, what, trainer.metrics.bad_steps, self._max_bad_steps, path),
            )

    def _write_aside(self, step: int, worst: list[int], mine: list[int], what: str) -> Path:
        """Write the batch of each process that met the fault; returns one of the files.

        A gradient is that of all processes: if losses are bad somewhere, theirs are to blame.
        """
        trainer, rank = self._trainer, self._trainer.args.process_index
        has_fault = max(mine[:2] if max(worst[:2]) >= 0 else mine) >= 0
        directory = Path(str(trainer.args.output_dir)) / bad_batch.DIRECTORY
        name = f"step-{step:06}-rank-{{}}"
        if has_fault:
            student, teacher, _ = mine
            description = {"step": step, "rank": rank, "fault": what}
            description |= {"student_block": student, "teacher_block": teacher}
            self._step_batches.write(directory / name.format(rank), description)
        which = torch.full((1,), rank if has_fault else -1, device=trainer.args.device)
        return directory / (name.format(trainer.reduce_max(which).item()) + ".safetensors")


def _diagnosis(worst: list[int]) -> tuple[str, str]:
    """What is wrong, and what to do: from a bad block of the student's, the teacher's, or -1."""
    student, teacher, _ = worst
    if teacher >= 0:
        return (
            f"the teacher's losses are NaN or infinite in block {teacher}",
            "load it in another precision (--teacher_dtype float32) or use another one",
        )
    if student >= 0:
        return (
            f"the student's losses are NaN or infinite in block {student}",
            "lower --learning_rate, or look at the text of this block",
        )
    return (
        "the student's gradient is NaN or infinite, though all losses are finite",
        "lower --learning_rate, or train without bf16 and fp16 to see where it comes from",
    )


def _student(trainer: ResumableTrainer) -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
