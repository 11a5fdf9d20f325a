"""What watches a run: stopping it before a bad number reaches the student."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from vocagnolm.token_loss import NonFiniteLoss

if TYPE_CHECKING:
    from vocagnolm.trainer import VocAgnoTrainer


class StepGuard(TrainerCallback):
    """Starts the step's clock, and stops the run before an update that rests on a NaN.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. The check costs one wait for the device per optimizer
    step, none per micro-batch. The student's last good state is saved first.
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
        """Stop if a loss of this optimizer step was not finite, on any process."""
        trainer = self._trainer
        student, teacher = trainer.metrics.bad_blocks(trainer.reduce_max)
        if student is None and teacher is None:
            return
        saved = trainer.save_progress()
        what = "the teacher's" if teacher is not None else "the student's"
        advice = (
            "load the teacher in another precision (--teacher_dtype float32) or use another one"
            if teacher is not None
            else "lower --learning_rate, or look at the text of this block"
        )
        block = teacher if teacher is not None else student
        raise NonFiniteLoss(
            f"step {state.global_step + 1}: {what} losses are NaN or infinite in block {block}; "
            f"no update was made, the state before it is in {saved}; {advice}"
        )
