"""Stop a run before a NaN reaches the weights, and write the step's batch aside."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.io import write_file, write_json
from vocagnolm.run.resumable import ResumableTrainer

logger = logging.getLogger(__name__)


class Recorder(TrainerCallback):
    """Interface of a callback that keeps the teacher's losses of a run."""

    def add(self, block_B: Tensor, loss_BT: Tensor) -> None:
        """Take the losses of a micro-batch of a kept step, in nats, and its blocks' numbers."""
        raise NotImplementedError

    def write(self, step: int) -> None:
        """Have all that was taken on the disk: a checkpoint of this step follows."""
        raise NotImplementedError


class StepBatches:
    """Micro-batches of the optimizer step in progress, and the losses found in them."""

    def __init__(self) -> None:
        self._batches: Sequence[Mapping[str, object]] = ()
        self._losses: list[dict[str, Tensor]] = []

    def begin(self, batches: Sequence[Mapping[str, object]]) -> None:
        """Forget the last step's, and keep those of the next one."""
        self._batches, self._losses = batches, []

    def add_losses(self, student_loss: Tensor, teacher_loss: Tensor | None = None) -> None:
        """Keep the losses of the next micro-batch, without a gradient."""
        found = {"student_loss": student_loss.detach(), "teacher_loss": teacher_loss}
        self._losses.append({name: x for name, x in found.items() if x is not None})

    def teacher_losses(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The blocks [B] and the teacher's losses [B, T] of every micro-batch, if there are any."""
        for batch, found in zip(self._batches, self._losses, strict=True):
            if "teacher_loss" in found:
                yield cast(Tensor, batch["block"]), found["teacher_loss"]

    def write(self, path: Path, description: Mapping[str, object]) -> None:
        """Write all tensors of all micro-batches to `path`.safetensors, with a `path`.json.

        The name of a tensor is the number of its micro-batch, a dot, and its key in the batch or
        `student_loss` or `teacher_loss`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{number}.{name}": value.cpu().contiguous()
            for number, (batch, found) in enumerate(zip(self._batches, self._losses, strict=True))
            for name, value in {**batch, **found}.items()
            if isinstance(value, Tensor)
        }
        content = save(tensors)
        blocks = [cast(Tensor, batch["block"]).tolist() for batch in self._batches]
        write_file(path.with_suffix(".safetensors"), lambda file: file.write(content))
        write_json(path.with_suffix(".json"), {**description, "blocks": blocks})


class StepGuard(TrainerCallback):
    """Let no update be made that rests on a NaN.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. One in the gradient would be saved with the student.
    The check costs one wait for the device per optimizer step, none per micro-batch; in the same
    reduction the processes learn whether one of them was asked to stop.

    Args:
        recorder: gets the teacher's losses of steps that made an update.
        max_bad_steps: steps in a row that may be skipped; one more stops the run, after the
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

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Start the clock of the metrics."""
        self._trainer.metrics.start()

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Skip the update, or stop, if a loss or a gradient is not finite on any process.

        Stop after the step, if any process was asked to.
        """
        trainer, model = self._trainer, cast(nn.Module, kwargs["model"])
        trainer.phases.begin("agreement")
        # One maximum over processes of four numbers, each -1 or 0 where all is well:
        #     block of a bad student loss | of a bad teacher loss | gradient is bad | asked to stop
        mine = torch.cat([trainer.metrics.bad_blocks, self._gradient_fault(model)[None]])
        asked = torch.full((1,), int(trainer.preemption.is_asked), device=mine.device)
        *worst, is_asked = _largest(torch.cat([mine, asked])).tolist()
        if is_asked:
            trainer.preemption.agree()
            control.should_training_stop = True
        if max(worst) < 0:
            trainer.metrics.keep_step()
            if self._recorder is not None:
                for found in self._step_batches.teacher_losses():
                    self._recorder.add(*found)
        else:
            self._skip_or_stop(model, state.global_step + 1, worst, mine.tolist())
        trainer.phases.begin("update")

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        """End the update."""
        self._trainer.phases.begin("other")

    def _gradient_fault(self, model: nn.Module) -> Tensor:
        """0 if this process's gradients are not finite, else -1; waits for nothing."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if not gradients or self._trainer.accelerator.scaler is not None:
            # float16's scaler meets infinities as a matter of course, and skips the step itself.
            return torch.full((), -1, device=self._trainer.args.device)
        # Offloaded gradients are on another device than the losses.
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        return is_finite.long().neg().to(self._trainer.args.device)

    def _skip_or_stop(self, model: nn.Module, step: int, worst: list[int], mine: list[int]) -> None:
        """Make no update, on all processes alike; `worst` is their maximum of `mine`."""
        trainer = self._trainer
        fault, advice = _diagnosis(worst)
        path = self._write_aside(step, worst, mine, fault)
        if trainer.metrics.bad_steps >= self._max_bad_steps:
            saved = trainer.save_progress()
            state = f"the state before it is in {saved}" if saved else "and none before"
            raise NonFiniteLoss(
                f"step {step}: {fault}; no update was made, {state}; {advice}; "
                f"the batch is in {path}"
            )
        trainer.metrics.drop_step()
        # An optimizer passes over parameters without a gradient, and leaves their state alone.
        for parameter in model.parameters():
            parameter.grad = None
        if trainer.is_world_process_zero():
            logger.warning(
                "step %d: %s; no update was made (%d in a row, --max_bad_steps %d); the batch is "
                "in %s",
                *(step, fault, trainer.metrics.bad_steps, self._max_bad_steps, path),
            )

    def _write_aside(self, step: int, worst: list[int], mine: list[int], fault: str) -> Path:
        """Write the batch of each process that met the fault; return one of the files."""
        trainer, rank = self._trainer, self._trainer.args.process_index
        # A gradient is that of all processes: if losses are bad somewhere, theirs are to blame.
        is_ours = max(mine[:2] if max(worst[:2]) >= 0 else mine) >= 0
        directory = Path(str(trainer.args.output_dir)) / "bad_steps"
        if is_ours:
            student, teacher, _ = mine
            description = {"step": step, "rank": rank, "fault": fault}
            description |= {"student_block": student, "teacher_block": teacher}
            self._step_batches.write(directory / f"step-{step:06}-rank-{rank}", description)
        written = torch.full((1,), rank if is_ours else -1, device=trainer.args.device)
        last = _largest(written).item()
        return directory / f"step-{step:06}-rank-{last}.safetensors"


def _largest(values: Tensor) -> Tensor:
    """Largest value over all processes, element by element."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, op=ReduceOp.MAX)
    return values


def _diagnosis(worst: list[int]) -> tuple[str, str]:
    """The fault and some advice, by a bad block of the student and of the teacher, or -1."""
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
