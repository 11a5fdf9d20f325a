"""What watches a run: stopping it before a bad number reaches the student."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.token_loss import NonFiniteLoss

if TYPE_CHECKING:
    from vocagnolm.trainer import VocAgnoTrainer


class StepGuard(TrainerCallback):
    """Starts the step's clock, and stops the run before an update that rests on a NaN.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. One in the gradient would be saved with the student.
    The check costs one wait for the device per optimizer step, none per micro-batch. The student's
    last good state is saved first.
    """

    def __init__(self, trainer: VocAgnoTrainer):
        self._trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock of the metrics."""
        self._trainer.metrics.start()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if a loss or a gradient of this optimizer step is not finite, on any process."""
        trainer = self._trainer
        found = torch.cat([trainer.metrics.bad_blocks, self._gradient_fault()[None]])
        student, teacher, gradient = trainer.reduce_max(found).tolist()
        if teacher >= 0:
            what = f"the teacher's losses are NaN or infinite in block {teacher}"
            advice = "load it in another precision (--teacher_dtype float32) or use another one"
        elif student >= 0:
            what = f"the student's losses are NaN or infinite in block {student}"
            advice = "lower --learning_rate, or look at the text of this block"
        elif gradient >= 0:
            what = "the student's gradient is NaN or infinite, though all losses are finite"
            advice = (
                "lower --learning_rate, or train without bf16 and fp16 to see where it comes from"
            )
        else:
            return
        saved = trainer.save_progress()
        raise NonFiniteLoss(
            f"step {state.global_step + 1}: {what}; no update was made, the state before it is in "
            f"{saved}; {advice}"
        )

    def _gradient_fault(self) -> Tensor:
        """0 if this process's gradients are not finite, else -1; waits for nothing."""
        parameters = self._trainer.model.parameters()
        gradients = [_local(p.grad) for p in parameters if p.grad is not None]
        if not gradients or self._trainer.accelerator.scaler is not None:
            # float16's scaler meets infinities as a matter of course, and skips the step itself.
            return torch.full((), -1, device=self._trainer.args.device)
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        return is_finite.long().neg().to(self._trainer.args.device)  # offloaded gradients are not


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
