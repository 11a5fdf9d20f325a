"""Guards the updates against NaN."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.training.metrics import NO_BLOCK, GuidanceMetrics
from vocagnolm.training.preemption import Preemption

logger = logging.getLogger(__name__)


class StepGuard(TrainerCallback):
    """Prevent updates from a NaN, and stop after this step if a signal asks for it.

    A NaN in the teacher's losses would not reach the loss, only the choice of tokens. The student
    would silently train on the wrong ones. A NaN in the gradient would be saved with the student.
    The check makes one host-device sync per optimizer step, and none per micro-batch.

    Args:
        metrics: has the losses of the step.
        preemption: knows whether a signal asks this process to stop.
        save_progress: saves the last completed step; returns its checkpoint, None before the first.
        max_bad_steps: steps in a row that may be skipped; one more stops the run, after the
            student's last good state is saved.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        metrics: GuidanceMetrics,
        preemption: Preemption,
        save_progress: Callable[[], str | None],
        max_bad_steps: int,
    ):
        self._accelerator = accelerator
        self._metrics = metrics
        self._preemption = preemption
        self._save_progress = save_progress
        self._max_bad_steps = max_bad_steps

    def on_pre_optimizer_step(self, args: object, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip the update, or stop, if a loss or gradient is not finite on any process."""
        model: nn.Module = kwargs["model"]
        # After one maximum over processes, all of them take the same branch. If one skipped alone,
        # its weights would differ, and if one stopped alone, the rest would wait. The maximum is of
        # four numbers, each -1 or 0 if all is well:
        #     bad sequence of the student | of the teacher | gradient is bad | asked to stop
        gradient = self._gradient_fault(model)
        stop_signal = torch.full_like(gradient, self._preemption.is_asked)
        worst_values = torch.cat([self._metrics.bad_blocks, torch.stack([gradient, stop_signal])])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst_values, op=ReduceOp.MAX)
        student_block, teacher_block, gradient_fault, is_asked_to_stop = worst_values.tolist()
        # The update below is still made, so the run stops after a whole step.
        if is_asked_to_stop:
            self._preemption.is_agreed = control.should_training_stop = True
        if max(student_block, teacher_block, gradient_fault) == NO_BLOCK:
            self._metrics.keep_step()
        else:
            self._skip_or_stop(model, state.global_step + 1, student_block, teacher_block)

    def _gradient_fault(self, model: nn.Module) -> Tensor:
        """Return 0 if this process's gradients are not finite, else -1, without a host sync."""
        gradients: list[Tensor] = []
        for parameter in model.parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            # Under FSDP2 each process looks at its own shards, and the maximum combines the
            # answers.
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
        if not gradients or self._accelerator.scaler is not None:
            # float16's scaler meets infinities regularly, and skips such steps itself.
            return torch.full((), NO_BLOCK, device=self._accelerator.device)
        # The norm of all gradients is not finite if any element is not. It takes a few kernels, and
        # the answer stays on the device.
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        # Offloaded gradients are on another device than the losses.
        return is_finite.long().neg().to(self._accelerator.device)

    def _skip_or_stop(
        self, model: nn.Module, step: int, student_block: int, teacher_block: int
    ) -> None:
        """Make no update, on all processes alike. The blocks are -1 if losses are finite."""
        # Name losses before the gradient, which is NaN as a consequence.
        if teacher_block != NO_BLOCK:
            fault = f"the teacher's losses are NaN or infinite in packed sequence {teacher_block}"
            advice = "load it in another precision (--teacher_dtype float32) or use another one"
        elif student_block != NO_BLOCK:
            fault = f"the student's losses are NaN or infinite in packed sequence {student_block}"
            advice = "lower --learning_rate, or look at the text of this sequence"
        else:
            fault = "the student's gradient is NaN or infinite, though all losses are finite"
            advice = "lower --learning_rate, or train without bf16 and fp16 to see its source"
        if self._metrics.bad_steps >= self._max_bad_steps:
            # Saving is collective. All processes get here together, because they agree on the
            # fault.
            checkpoint = self._save_progress()
            state = f"the state before it is in {checkpoint}" if checkpoint else "and none before"
            raise NonFiniteLoss(f"step {step}: {fault}; no update was made, {state}; {advice}")
        self._metrics.drop_step()
        # An optimizer skips parameters without a gradient, and does not change their state.
        model.zero_grad(set_to_none=True)
        if self._accelerator.is_main_process:
            logger.warning(
                "step %d: %s; no update was made (%d in a row, --max_bad_steps %d)",
                step,
                fault,
                self._metrics.bad_steps,
                self._max_bad_steps,
            )
