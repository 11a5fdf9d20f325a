"""What watches the steps of a run: the sums of its log, the guard of its updates, and the log."""

import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.guidance import random_scores
from vocagnolm.io import duration, in_short, write_text

if TYPE_CHECKING:
    from vocagnolm.run.resume import ResumableTrainer
    from vocagnolm.store.record import LossRecorder

logger = logging.getLogger(__name__)

# One tensor holds all sums, so that a log costs one reduction over the processes.
_SUMS = (
    "loss label_tokens student_loss selected_tokens selected_loss teacher_tokens teacher_loss "
    "mapped_tokens distances distance"
).split()
# Tokens whose excess losses are sampled between two logs: a quantile's rank is off by 0.6 %.
_SAMPLED = 2**13
_NONE = -1
_METRICS_FILE = "metrics_{}.safetensors"  # of one process
LOG_FILE = "log.jsonl"


class GuidanceMetrics:
    """Sums over the steps since the last `read`. Adding makes no host-device sync.

    Additions belong to the step in progress until it is kept or dropped.

    Attributes:
        bad_blocks: int64 [2], on the device: a packed sequence of this step on which the student's,
            and the teacher's, losses were not finite; -1 while there is none.
        bad_steps: how many of the last steps were dropped in a row.
        excess_sample: excess losses of random tokens that were read last, in nats; None without a
            teacher.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator, self._device = accelerator, accelerator.device
        # MPS has no float64.
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self.excess_sample: Tensor | None = None
        self.restore(None)

    def _clear(self) -> None:
        self._kept = torch.zeros(len(_SUMS), dtype=self._dtype, device=self._device)
        self._added = torch.zeros_like(self._kept)
        # The tokens with the largest random scores, and their excess losses: the same sample for
        # every split of the tokens into micro-batches and processes.
        scores = torch.full((_SAMPLED,), _NONE, dtype=torch.int64, device=self._device)
        self._kept_sample = self._sample = scores, torch.zeros(_SAMPLED, device=self._device)
        self._kept_steps = self._dropped_steps = 0

    def keep_step(self) -> None:
        """Count all additions since the last step."""
        self._kept += self._added
        self._added.zero_()
        self._kept_sample = self._sample
        self._kept_steps += 1
        self.bad_steps = 0

    def drop_step(self) -> None:
        """Forget all additions since the last step, which made no update."""
        self._added.zero_()
        self._sample = self._kept_sample
        self.bad_blocks.fill_(_NONE)
        self._dropped_steps += 1
        self.bad_steps += 1

    def add_loss(self, loss: Tensor) -> None:
        """Count a micro-batch's part of the loss that is trained on."""
        self._add(loss=loss.detach())

    def add_student(
        self, loss_BS: Tensor, valid_BS: Tensor, weight_BS: Tensor, block_B: Tensor
    ) -> None:
        """Count the student's losses [B, S], which tokens have one, and their weights."""
        loss_BS = loss_BS.detach()
        self._mark_bad(0, loss_BS, block_B)
        self._add(label_tokens=valid_BS, student_loss=loss_BS * valid_BS)
        self._add(selected_tokens=weight_BS, selected_loss=loss_BS * weight_BS)

    def add_teacher(self, loss_BT: Tensor, valid_BT: Tensor, block_B: Tensor) -> None:
        """Count the teacher's own losses [B, T]."""
        self._mark_bad(1, loss_BT, block_B)
        self._add(teacher_tokens=valid_BT, teacher_loss=loss_BT * valid_BT)

    def add_distances(self, distance_R: Tensor, loss_BS: Tensor, block_B: Tensor) -> None:
        """Count the distances of the student's distributions from the teacher's.

        One that is not finite is the teacher's fault where the student's losses [B, S] are finite.
        """
        distance_R = distance_R.detach()
        is_blameless = loss_BS.detach().isfinite().all()
        self._mark_bad(1, distance_R.where(is_blameless, 0.0)[None], block_B[:1])
        self._add(distances=torch.ones_like(distance_R), distance=distance_R)

    def add_excess(self, excess_BS: Tensor, mapped_BS: Tensor, block_B: Tensor) -> None:
        """Count the label tokens that have a teacher loss, and sample their excess losses."""
        self._add(mapped_tokens=mapped_BS)
        position_S = torch.arange(mapped_BS.shape[1], device=self._device)
        score_BS = random_scores(block_B, position_S, seed=0).where(mapped_BS, _NONE)
        more = score_BS.flatten(), excess_BS.detach().float().flatten()
        self._sample = _sampled([self._sample, more])

    def _mark_bad(self, model: int, loss: Tensor, block_B: Tensor) -> None:
        is_bad_B = ~loss.isfinite().all(-1)
        worst = block_B.where(is_bad_B, _NONE).max()
        self.bad_blocks[model] = self.bad_blocks[model].maximum(worst)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._added[_SUMS.index(name)] += value.sum(dtype=self._dtype)

    def read(self) -> dict[str, float]:
        """Average over all processes and forget; every process must call it.

        Returns losses in nats per token, shares in [0, 1], quantiles of a sample, and the mean
        distance. `loss` is the mean over the steps that made an update; losses are absent if none
        did.
        """
        totals = self._accelerator.reduce(self._kept, "sum").tolist()
        sums = dict(zip(_SUMS, totals, strict=True))
        scores, excess = (self._accelerator.gather(part) for part in self._kept_sample)
        report = {}
        if self._kept_steps:
            processes = self._accelerator.num_processes
            report["loss"] = sums["loss"] / processes / self._kept_steps
        if self._dropped_steps:
            report["skipped_steps"] = float(self._dropped_steps)
        self._clear()
        tokens = max(sums["label_tokens"], 1.0)
        if sums["label_tokens"]:
            report["student_loss_nats"] = sums["student_loss"] / tokens
            report["selected_loss_nats"] = sums["selected_loss"] / max(sums["selected_tokens"], 1.0)
        report["selected_fraction"] = sums["selected_tokens"] / tokens
        if sums["distances"]:
            report["distance_from_teacher"] = sums["distance"] / sums["distances"]
            report["unmapped_fraction"] = 1.0 - sums["distances"] / tokens
        if sums["teacher_tokens"]:
            report["teacher_loss_nats"] = sums["teacher_loss"] / sums["teacher_tokens"]
            report["teacher_tokens_per_student_token"] = sums["teacher_tokens"] / tokens
            report["unmapped_fraction"] = 1.0 - sums["mapped_tokens"] / tokens
            scores, excess = _sampled([(scores, excess)])
            sample = self.excess_sample = excess[scores != _NONE].cpu()
            for percent in (10, 50, 90) if len(sample) else ():
                report[f"excess_loss_p{percent}_nats"] = sample.quantile(percent / 100).item()
        return report

    def mean_loss(self, history: Sequence[Mapping[str, float]]) -> float:
        """Average the loss of all steps of a run, those in its log and those since; NaN of none."""
        mine = self._kept[_SUMS.index("loss")]
        total = self._accelerator.reduce(mine, "sum").item() / self._accelerator.num_processes
        steps, before = float(self._kept_steps), 0.0
        for entry in history:
            # An entry of the training: its `loss` is the mean since the entry before, and absent
            # where all of these steps were skipped.
            if "selected_fraction" in entry:
                since = entry["step"] - before - entry.get("skipped_steps", 0.0)
                total, steps = total + entry.get("loss", 0.0) * since, steps + since
                before = entry["step"]
        return total / steps if steps else float("nan")

    def save(self, directory: Path) -> None:
        """Write the sums of this process; its steps have all been kept or dropped."""
        scores, excess = self._kept_sample
        steps = torch.tensor([self._kept_steps, self._dropped_steps, self.bad_steps])
        state = {"sums": self._kept, "scores": scores, "excess": excess, "steps": steps}
        save_file(state, directory / _METRICS_FILE.format(self._accelerator.process_index))

    def restore(self, directory: Path | None) -> None:
        """Start from a checkpoint's sums, if it has any, or from none."""
        self.bad_blocks = torch.full((2,), _NONE, device=self._device)
        self.bad_steps, self.excess_sample = 0, None
        self._clear()
        process, world_size = self._accelerator.process_index, self._accelerator.num_processes
        files = sorted(directory.glob(_METRICS_FILE.format("*"))) if directory else []
        if not files:
            return
        # After a change of the number of processes, the first one takes up the sums of all.
        is_same = len(files) == world_size
        own = [file for file in files if file.name == _METRICS_FILE.format(process)]
        states = [load_file(file) for file in (own if is_same else files)]
        self._kept_steps, self._dropped_steps, self.bad_steps = states[0]["steps"].tolist()
        if is_same or process == 0:
            for state in states:
                self._kept += state["sums"].to(self._kept)
            scores, excess = _sampled([(state["scores"], state["excess"]) for state in states])
            self._kept_sample = self._sample = scores.to(self._device), excess.to(self._device)
        # A micro-batch's loss is times the processes, which gradients are averaged over.
        self._kept[_SUMS.index("loss")] *= world_size / len(files)


def _sampled(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge samples: the values with the largest scores."""
    scores, values = (torch.cat(each) for each in zip(*parts, strict=True))
    best = scores.topk(_SAMPLED)
    return best.values, values[best.indices]


# -- The guard of the updates ------------------------------------------------------------------


class StepGuard(TrainerCallback):
    """Let no update be made that rests on a NaN; stop after this step if a signal asks.

    A NaN in the teacher would not reach the loss, only the choice of tokens: the student would go
    on training on the wrong ones, silently. One in the gradient would be saved with the student.
    The check makes one host-device sync per optimizer step, none per micro-batch.

    Args:
        recorder: gets the teacher's losses of steps that made an update.
        max_bad_steps: steps in a row that may be skipped; one more stops the run, after the
            student's last good state is saved.
    """

    def __init__(
        self, trainer: "ResumableTrainer", recorder: "LossRecorder | None", max_bad_steps: int
    ):
        self._trainer, self._recorder, self._max_bad_steps = trainer, recorder, max_bad_steps
        # Of the step in progress.
        self._teacher_losses: list[tuple[Tensor, Tensor]] = []

    def add_teacher(self, block_B: Tensor, loss_BT: Tensor) -> None:
        """Hold the teacher's losses [B, T] for the recorder until the step is kept."""
        if self._recorder is not None:
            self._teacher_losses.append((block_B, loss_BT))

    def on_pre_optimizer_step(
        self, args: object, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Skip the update, or stop, if a loss or a gradient is not finite on any process."""
        model: nn.Module = kwargs["model"]
        metrics, preemption = self._trainer.metrics, self._trainer.preemption
        # One maximum over processes of four numbers, each -1 or 0 where all is well:
        #     bad sequence of the student | of the teacher | gradient is bad | asked to stop
        gradient = self._gradient_fault(model)
        asked = torch.full_like(gradient, preemption.is_asked)
        worst = torch.cat([metrics.bad_blocks, torch.stack([gradient, asked])])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(worst, op=ReduceOp.MAX)
        *faults, is_asked = worst.tolist()
        if is_asked:
            preemption.is_agreed = control.should_training_stop = True
        if max(faults) == _NONE:
            metrics.keep_step()
            for found in self._teacher_losses:
                assert self._recorder is not None
                self._recorder.add(*found)
        else:
            self._skip_or_stop(model, state.global_step + 1, *faults)
        self._teacher_losses = []

    def _gradient_fault(self, model: nn.Module) -> Tensor:
        """0 if this process's gradients are not finite, else -1; without a host-device sync."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        if not gradients or self._trainer.accelerator.scaler is not None:
            # float16's scaler meets infinities as a matter of course, and skips the step itself.
            return torch.full((), _NONE, device=self._trainer.args.device)
        # Offloaded gradients are on another device than the losses.
        is_finite = torch.nn.utils.get_total_norm(gradients).isfinite()
        return is_finite.long().neg().to(self._trainer.args.device)

    def _skip_or_stop(
        self, model: nn.Module, step: int, student: int, teacher: int, gradient: int
    ) -> None:
        """Make no update, on all processes alike."""
        trainer, metrics = self._trainer, self._trainer.metrics
        if teacher != _NONE:
            fault = f"the teacher's losses are NaN or infinite in packed sequence {teacher}"
            advice = "load it in another precision (--teacher_dtype float32) or use another one"
        elif student != _NONE:
            fault = f"the student's losses are NaN or infinite in packed sequence {student}"
            advice = "lower --learning_rate, or look at the text of this sequence"
        else:
            fault = "the student's gradient is NaN or infinite, though all losses are finite"
            advice = "lower --learning_rate, or train without bf16 and fp16 to see its source"
        if metrics.bad_steps >= self._max_bad_steps:
            saved = trainer.save_progress()
            before = f"the state before it is in {saved}" if saved else "and none before"
            raise NonFiniteLoss(f"step {step}: {fault}; no update was made, {before}; {advice}")
        metrics.drop_step()
        # An optimizer passes over parameters without a gradient, and leaves their state alone.
        for parameter in model.parameters():
            parameter.grad = None
        if trainer.is_world_process_zero():
            logger.warning(
                "step %d: %s; no update was made (%d in a row, --max_bad_steps %d)",
                *(step, fault, metrics.bad_steps, self._max_bad_steps),
            )


# -- The log -----------------------------------------------------------------------------------


class RunLog(TrainerCallback):
    """Print every entry of a log in one line, and keep all of it in `log.jsonl`."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        # The step and the time at which training began.
        self._begin = 0, 0.0
        # An evaluation alone has no run to keep, and may have no directory.
        self._path: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *rest: object, **kwargs: object
    ) -> None:
        """Write the history of the checkpoint that is resumed from, and the head of the table."""
        self._begin = state.global_step, time.monotonic()
        if state.is_world_process_zero:
            self._path = Path(str(args.output_dir), LOG_FILE)
            # What was logged after the checkpoint is going to be logged again.
            write_text(self._path, "".join(map(_line, state.log_history)))
            _print_row("step tokens loss student teacher kept tok/s left".split())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *rest: object, **kwargs: object
    ) -> None:
        """Print the newest entry."""
        if not state.is_world_process_zero:
            return
        entry, step = state.log_history[-1], state.global_step
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        cells = [str(step), in_short(step * self._tokens_per_step)]
        if "selected_fraction" not in entry:
            shown = [name for name in entry if name.endswith("loss")]
            _print_row(cells, ", ".join(f"{name} {entry[name]:.4f}" for name in shown))
            return
        losses = ("loss", "student_loss_nats", "teacher_loss_nats")
        cells += [f"{entry[name]:.4f}" if name in entry else "-" for name in losses]
        before, began = self._begin
        pace = (time.monotonic() - began) / max(step - before, 1)
        cells += [f"{entry['selected_fraction']:.1%}", in_short(entry.get("tokens_per_s", 0.0))]
        cells.append(duration(pace * (state.max_steps - step)))
        skipped = entry.get("skipped_steps")
        _print_row(cells, f"{skipped:g} steps skipped" if skipped else "")


def _line(entry: Mapping[str, object]) -> str:
    return json.dumps(entry) + "\n"


def _print_row(cells: Sequence[str], rest: str = "") -> None:
    widths = (7, 7, 8, 8, 8, 6, 7, 10)
    row = "".join(map(str.rjust, cells, widths))
    # Above a bar, if there is one.
    tqdm.write(f"{row}   {rest}".rstrip())
    sys.stdout.flush()


class _Bar(ProgressCallback):
    """Progress bar that leaves the log to `RunLog`."""

    def on_log(self, *args: object, **kwargs: object) -> None:
        """Print nothing."""


def log_in_lines(trainer: Trainer, tokens_per_step: int) -> None:
    """Replace Trainer's printed dictionaries by the lines of `RunLog`."""
    trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(_Bar)
    trainer.add_callback(RunLog(tokens_per_step))
