"""What all processes agree on before an update: to skip it after a NaN, or to stop after it."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerState

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.fields import named
from vocagnolm.training.metrics import NO_BLOCK, GuidanceMetrics

logger = logging.getLogger(__name__)


class Preemption(TrainerCallback):
    """Stop after the current step when any process gets SIGTERM, SIGUSR1 or a first Ctrl-C.

    All processes learn about it in the reduction that `StepGuard` makes before every update.

    Attributes:
        is_asked: this process was asked to stop.
        is_agreed: all processes stop after this step, or have stopped with everything saved.
        saved_step: the step of the newest checkpoint of this process; -1 while there is none.
    """

    is_asked = False
    is_agreed = False
    saved_step = -1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside. Only the main thread can."""
        # A trainer may train again after it was stopped, and then begins without a request.
        self.is_asked = False
        self.is_agreed = False
        # Python lets only the main thread set handlers. In another thread, the job runs without
        # them.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT) if is_main else ()
        handlers = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                # None means a handler that was not set from Python, which Python cannot restore.
                signal.signal(number, handler or signal.SIG_DFL)

    def _ask(self, number: int, frame: object) -> None:
        # A first Ctrl-C waits for the end of the step. A second one means that the user will not.
        if self.is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Launchers pass a signal on to all processes of a machine.
        if not self.is_asked and os.environ.get("LOCAL_RANK", "0") == "0":
            # This is safe inside a signal handler, where a buffered stream is not.
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())
        # The next reduction does the rest, because a handler may run in the middle of any code.
        self.is_asked = True

    def on_epoch_end(self, args: object, state: TrainerState, control: Any, **_: object) -> None:
        """Ask for a checkpoint if this state has none. This event follows every stop."""
        if not self.is_agreed:
            return
        # After a stop inside an epoch, the resumed run does the log and evaluation of its end.
        if state.epoch is None or not float(state.epoch).is_integer():
            control.should_log = control.should_evaluate = False
        # A checkpoint of this step that was saved before its log or evaluation lacks their entries,
        # so save it again after them.
        is_saved = self.saved_step == state.global_step
        control.should_save = control.should_log or control.should_evaluate or not is_saved


class StepGuard(TrainerCallback):
    """Prevent updates from a NaN, and stop after this step if a signal asks for it.

    A NaN in the teacher's losses would not reach the loss, only the choice of tokens. The student
    would silently train on the wrong ones. A NaN in the gradient would be saved with the student.
    The check makes one host-device sync per optimizer step, and none per micro-batch.

    Args:
        metrics: has the losses of the step.
        preemption: knows whether a signal asks this process to stop.
        save_progress: saves the last completed step; returns its checkpoint, None before the first.
    """

    def __init__(
        self,
        metrics: GuidanceMetrics,
        preemption: Preemption,
        save_progress: Callable[[], str | None],
    ):
        self._accelerator = metrics.accelerator
        self._metrics = metrics
        self._preemption = preemption
        self._save_progress = save_progress

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
            return
        fault, advice = _fault(student_block, teacher_block)
        step, bad_steps = state.global_step + 1, self._metrics.bad_steps + 1
        if bad_steps > args.max_bad_steps:
            # Saving is collective. All processes get here together, because they agree on the
            # fault.
            checkpoint = self._save_progress()
            saved = f"; the state before is in {checkpoint}" if checkpoint else ", nor any before"
            raise NonFiniteLoss(f"step {step}: {fault}, so no update was made{saved}: {advice}")
        self._metrics.drop_step()
        # An optimizer skips parameters without a gradient, and does not change their state.
        model.zero_grad(set_to_none=True)
        if self._accelerator.is_main_process:
            logger.warning(
                "step %d: %s; no update was made (%d in a row, %s %d)",
                step,
                fault,
                bad_steps,
                named("max_bad_steps"),
                args.max_bad_steps,
            )

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


def _fault(student_block: int, teacher_block: int) -> tuple[str, str]:
    """Say what is not finite, and what may help. The blocks are -1 if losses are finite."""
    # Name losses before the gradient, which is NaN as a consequence.
    if teacher_block != NO_BLOCK:
        return (
            f"the teacher's losses are NaN or infinite in packed sequence {teacher_block}",
            f"load it in another precision ({named('teacher_dtype')} float32) or use another one",
        )
    if student_block != NO_BLOCK:
        return (
            f"the student's losses are NaN or infinite in packed sequence {student_block}",
            f"lower {named('learning_rate')}, or look at the text of this sequence",
        )
    return (
        "the student's gradient is NaN or infinite, though all losses are finite",
        f"lower {named('learning_rate')}, or train without bf16 and fp16 to see its source",
    )
