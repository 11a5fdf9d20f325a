"""Measure a run: losses and shares of the tokens, tokens per second, MFU, memory; and its log.

MFU is model FLOPs / (seconds x peak FLOP/s). FLOPs are counted from a decoder's linear layers: only
matrix products that the losses need, so no padding, no recomputation, attention to visible keys.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # accelerate needs it too
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
)
from transformers.pytorch_utils import Conv1D

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.guidance import random_scores
from vocagnolm.io import write_text

logger = logging.getLogger(__name__)

# One tensor holds all sums, so that a log costs one reduction over the processes.
_SUMS = (
    "loss label_tokens student_loss selected_tokens selected_loss teacher_tokens teacher_loss "
    "mapped_tokens distances distance"
).split()
# Tokens whose excess losses are sampled between two logs: a quantile's rank is off by 0.6 %.
_SAMPLED = 2**13
NO_BLOCK = -1
_METRICS_FILE = "metrics_{}.safetensors"  # of one process
LOG_FILE = "log.jsonl"
# A teacher that is ahead of the student on fewer tokens is warned of.
_FEW_AHEAD = 0.25
# The mean weight of a log of the training, by its method.
_WEIGHTS = ("selected_fraction", "mean_weight")


class GuidanceMetrics:
    """Sums over the steps since the last `read`. Adding makes no host-device sync.

    Additions belong to the step in progress until it is kept or dropped.

    Attributes:
        bad_blocks: int64 [2], on the device: a packed sequence of this step on which the student's,
            and the teacher's, losses were not finite; -1 while there is none.
        bad_steps: how many of the last steps were dropped in a row.
        weight_name: of the mean weight in the report.
    """

    weight_name = "selected_fraction"

    def __init__(self, accelerator: Accelerator):
        self._accelerator, self._device = accelerator, accelerator.device
        # MPS has no float64.
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self.restore(None)

    def _clear(self) -> None:
        self._kept = torch.zeros(len(_SUMS), dtype=self._dtype, device=self._device)
        self._added = torch.zeros_like(self._kept)
        # The tokens with the largest random scores, and their excess losses: the same sample for
        # every split of the tokens into micro-batches and processes.
        scores = torch.full((_SAMPLED,), NO_BLOCK, dtype=torch.int64, device=self._device)
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
        self.bad_blocks.fill_(NO_BLOCK)
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
        score_BS = random_scores(block_B, position_S, seed=0).where(mapped_BS, NO_BLOCK)
        more = score_BS.flatten(), excess_BS.detach().float().flatten()
        self._sample = _sampled([self._sample, more])

    def _mark_bad(self, model: int, loss: Tensor, block_B: Tensor) -> None:
        is_bad_B = ~loss.isfinite().all(-1)
        worst = block_B.where(is_bad_B, NO_BLOCK).max()
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
        report[self.weight_name] = sums["selected_tokens"] / tokens
        if sums["distances"]:
            report["distance_from_teacher"] = sums["distance"] / sums["distances"]
            report["unmapped_fraction"] = 1.0 - sums["distances"] / tokens
        if sums["teacher_tokens"]:
            report["teacher_loss_nats"] = sums["teacher_loss"] / sums["teacher_tokens"]
            report["teacher_tokens_per_student_token"] = sums["teacher_tokens"] / tokens
            report["unmapped_fraction"] = 1.0 - sums["mapped_tokens"] / tokens
            scores, excess = _sampled([(scores, excess)])
            sample = excess[scores != NO_BLOCK].cpu()
            if len(sample):
                report["teacher_ahead_fraction"] = (sample > 0).double().mean().item()
                for percent in (10, 50, 90):
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
            if any(name in entry for name in _WEIGHTS):
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
        self.bad_blocks = torch.full((2,), NO_BLOCK, device=self._device)
        self.bad_steps = 0
        self._clear()
        process, world_size = self._accelerator.process_index, self._accelerator.num_processes
        count = len([*directory.glob(_METRICS_FILE.format("*"))]) if directory else 0
        if directory is None or not count:
            return
        # After a change of the number of processes, each takes up the sums of some, or of none.
        states = [load_file(directory / _METRICS_FILE.format(i)) for i in range(count)]
        self._kept_steps, self._dropped_steps, self.bad_steps = states[0]["steps"].tolist()
        for state in states[process::world_size]:
            self._kept += state["sums"].to(self._kept)
            sample = state["scores"].to(self._device), state["excess"].to(self._device)
            self._kept_sample = self._sample = _sampled([self._kept_sample, sample])
        # A micro-batch's loss is times the processes, which gradients are averaged over.
        self._kept[_SUMS.index("loss")] *= world_size / count


def _sampled(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge samples: the values with the largest scores."""
    scores, values = (torch.cat(each) for each in zip(*parts, strict=True))
    best = scores.topk(_SAMPLED)
    return best.values, values[best.indices]


# -- The log -----------------------------------------------------------------------------------


class RunLog(TrainerCallback):
    """Print every entry of a log in one line, and keep all of it in `log.jsonl`."""

    def __init__(self, tokens_per_step: int):
        self._tokens_per_step = tokens_per_step
        # The step and the time at which training began.
        self._begin = 0, 0.0
        self._warned = False
        # An evaluation alone has no run to keep, and may have no directory.
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: TrainerState, *_: object, **__: object) -> None:
        """Write the history of the checkpoint that is resumed from, and the head of the table."""
        self._begin = state.global_step, time.monotonic()
        if state.is_world_process_zero:
            self._path = Path(str(args.output_dir), LOG_FILE)
            # What was logged after the checkpoint is going to be logged again.
            history = "".join(json.dumps(entry) + "\n" for entry in state.log_history)
            write_text(self._path, history)
            _print_row("step tokens loss student teacher kept lr grad tok/s left".split())

    def on_log(self, args: object, state: TrainerState, *_: object, **__: object) -> None:
        """Print the newest entry."""
        if not state.is_world_process_zero:
            return
        entry, step = state.log_history[-1], state.global_step
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        cells, rest = [str(step), tqdm.format_sizeof(step * self._tokens_per_step)], ""
        if weights := [entry[name] for name in _WEIGHTS if name in entry]:
            losses = ("loss", "student_loss_nats", "teacher_loss_nats")
            cells += [f"{entry[name]:.4f}" if name in entry else "-" for name in losses]
            cells.append(f"{weights[0]:.1%}")
            for name, form in (("learning_rate", ".1e"), ("grad_norm", ".3g")):
                cells.append(f"{entry[name]:{form}}" if name in entry else "-")
            cells.append(tqdm.format_sizeof(entry.get("tokens_per_s", 0.0)))
            before, began = self._begin
            pace = (time.monotonic() - began) / max(step - before, 1)
            cells.append(tqdm.format_interval(pace * (state.max_steps - step)))
            if skipped := entry.get("skipped_steps"):
                rest = f"{skipped:g} steps skipped"
            ahead = entry.get("teacher_ahead_fraction", 1.0)
            if ahead < _FEW_AHEAD and not self._warned:
                self._warned = True
                logger.warning(
                    "step %d: the teacher's loss is below the student's on %.0f %% of the tokens "
                    "it covers: it has little to teach; compare with --method cpt",
                    *(step, 100 * ahead),
                )
        else:
            shown = [name for name in entry if name.endswith("loss")]
            rest = ", ".join(f"{name} {entry[name]:.4f}" for name in shown)
        _print_row(cells, rest)


def _print_row(cells: Sequence[str], rest: str = "") -> None:
    widths = (7, 6, 7, 7, 7, 6, 7, 6, 5, 8)
    row = " ".join(map(str.rjust, cells, widths))
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


# -- Throughput --------------------------------------------------------------------------------

_GIB = 2**30
# Dense bfloat16 TFLOP/s with sums in float32, by words of the name that CUDA gives a device; from
# NVIDIA's data sheets (half of "with sparsity") and, for GeForce, its Ada and Ampere white papers.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H200 NVL": 835.5,
    "GH200": 989.4,
    "H100 HBM3": 989.4,  # the SXM module
    "H100 PCIE": 756.5,
    "H100 NVL": 835.5,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "4090": 165.2,
    "3090": 71.0,
}
# Fewer or slower units under the same name.
_OTHER_CHIPS = {"LAPTOP", "MIG", "TI", "D"}


class Throughput(TrainerCallback):
    """Measure the steps of a run, with one host-device sync per `read`.

    Time counts from the first step after a log to the next log: what is evaluated and saved right
    after a log costs no time.

    Args:
        teachers: online ones, whose forward passes are timed.
        peak_tflops: of one device in dense bfloat16; looked up by default. Without, no MFU.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        teachers: Sequence[PreTrainedModel],
        peak_tflops: float | None = None,
    ):
        self._accelerator, self._device = accelerator, accelerator.device
        self._teachers = teachers
        # Of the student and the teachers; empty if one of them cannot be counted.
        self._works: list[ModelWork] = []
        self._peak_flops = _peak_flops(self._device, peak_tflops)
        self._clear()

    def _clear(self) -> None:
        self._since: float | None = None
        self._teacher_s = 0.0
        self._teacher_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # Of student and teachers: tokens with a loss, their keys, and the tokens that a head reads.
        shape = 1 + len(self._teachers), 3
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self._device)

    def on_train_begin(self, *args: object, **kwargs: Any) -> None:
        """Count the weights of all models, and forget an earlier run."""
        self._clear()
        try:
            self._works = [model_work(model) for model in (kwargs["model"], *self._teachers)]
        except ValueError as error:
            self._works = []
            logger.warning("no MFU: %s", error)

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Start the clock, if a log has stopped it."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Count the time of what is computed inside as the teacher's."""
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._teacher_s += time.perf_counter() - start_s
            return
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        yield
        stop.record()
        self._teacher_events.append((start, stop))

    def count(
        self, model: int, position_BT: Tensor, label_BT: Tensor, head_tokens: int | None = None
    ) -> None:
        """Count a micro-batch of the student, 0, or of a teacher; a head reads all by default."""
        valid_BT = label_BT != IGNORED_LABEL
        # A label token at position p of its document is predicted from the p tokens before it.
        tokens, keys = valid_BT.sum(), (position_BT * valid_BT).sum()
        head = tokens if head_tokens is None else torch.full_like(tokens, head_tokens)
        self._counts[model] += torch.stack([tokens, keys, head])

    def read(self) -> dict[str, float]:
        """Return all measures since the last read, {} outside of `train`; every process calls it.

        The teacher's MFU is of the time of its forward passes, the student's of all other time;
        memory is the most of any process in GiB.
        """
        if self._since is None:
            return {}
        elapsed_s = time.perf_counter() - self._since
        teacher_s = self._teacher_s
        for start, stop in self._teacher_events:
            stop.synchronize()
            teacher_s += start.elapsed_time(stop) / 1000
        ours, *theirs = self._counts.tolist()
        flops = [0.0, 0.0]
        if self._works:
            student, *teachers = self._works
            flops[0] = student.training_flops(*ours)
            for teacher, counts in zip(teachers, theirs, strict=True):
                flops[1] += teacher.forward_flops(*counts)
        self._clear()
        memory = _memory_gib(self._device)
        # A row of each process: [ sums ... | memory ... ], added up and maximised.
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        row = [elapsed_s, teacher_s, ours[0], *flops, *memory.values()]
        rows = self._accelerator.gather(torch.tensor([row], dtype=dtype, device=self._device)).cpu()
        elapsed_s, teacher_s, tokens, *flops = rows[:, :5].sum(0).tolist()
        report = {"tokens_per_s": tokens / elapsed_s * len(rows)}
        if theirs:
            report["teacher_time_fraction"] = teacher_s / elapsed_s
        seconds = (elapsed_s - teacher_s, teacher_s)
        for role, done, busy_s in zip(("student", "teacher"), flops, seconds, strict=True):
            if self._peak_flops and done:
                report[f"{role}_mfu"] = done / (busy_s * self._peak_flops)
        return report | dict(zip(memory, rows[:, 5:].amax(0).tolist(), strict=True))


def _memory_gib(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"memory_resident_gib": psutil.Process().memory_info().rss / _GIB}
    memory = {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return memory


# -- FLOPs and peaks ---------------------------------------------------------------------------


def peak_tflops(device_name: str) -> float | None:
    """Look up the peak of a GPU in dense bfloat16, in TFLOP/s; None of an unknown one."""
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    known = [name for name in _PEAK_TFLOPS if words.issuperset(name.split())]
    if not known or words & _OTHER_CHIPS:
        return None
    return _PEAK_TFLOPS[max(known, key=lambda name: len(name.split()))]


def _peak_flops(device: torch.device, tflops: float | None) -> float | None:
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if (tflops := peak_tflops(name)) is None:
            logger.warning("no MFU: the peak of %s is unknown; give --device_peak_tflops", name)
    return tflops and tflops * 1e12


@dataclass(frozen=True)
class ModelWork:
    """Cost of tokens in a decoder: two FLOPs for each multiplication with its addition.

    Attributes:
        body: weights of all linear layers without the output head; the embedding is a look-up.
        head: weights of the output head.
        trained_body, trained_head: those of them that get a gradient.
        attention: layers x heads x head dimension, the multiplications of Q K^T for one key; A V
            takes as many.
    """

    body: int
    head: int
    trained_body: int
    trained_head: int
    attention: int

    def forward_flops(self, tokens: float, keys: float, head_tokens: float) -> float:
        """FLOPs of a forward pass of tokens that attend to so many keys in all."""
        weights = self.body * tokens + self.head * head_tokens
        return 2 * weights + 4 * self.attention * keys

    def training_flops(self, tokens: float, keys: float, used_tokens: float) -> float:
        """FLOPs of a forward and a backward pass, in which the head reads the used tokens only."""
        # Backward, each weight is multiplied for the gradient of its input, and once more for its
        # own if it has one. (Below the first trained weight nothing needs an input's gradient: with
        # adapters this counts a little too much, less than 1 % from 10 layers on.)
        body = (self.body + self.trained_body) * tokens
        head = (self.head + self.trained_head) * used_tokens
        forward = self.forward_flops(tokens, keys, tokens)
        return forward + 2 * (body + head) + 8 * self.attention * keys


def model_work(model: PreTrainedModel) -> ModelWork:
    """Count the weights of a causal language model of `transformers`, adapters included.

    Raises:
        ValueError: not every token meets every weight in a linear layer, as with experts.
    """
    config = model.config.get_text_config()
    output_head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    body = head = trained_body = trained_head = 0
    for name, module in model.named_modules():
        # A layer that PEFT keeps of before, beside the trained copy of it that runs.
        if "original_module" in name.split("."):
            continue
        # By its features: quantized weights have other shapes.
        if isinstance(module, nn.Linear):
            count = module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count = module.weight.numel()
        elif isinstance(module, nn.Embedding) or not _has_weights(module):
            continue
        else:
            raise ValueError(
                f"the FLOPs of {type(model).__name__} cannot be counted from its linear layers: it "
                f"has a {type(module).__name__}"
            )
        trained = count * module.weight.requires_grad
        if module is output_head:
            head, trained_head = head + count, trained_head + trained
        else:
            body, trained_body = body + count, trained_body + trained
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelWork(body, head, trained_body, trained_head, layers * heads * head_dim)


def _has_weights(module: nn.Module) -> bool:
    """Return True for a matrix, quantized or not."""
    weights: list[Tensor] = [*module.parameters(recurse=False)]
    # Quantized ones are buffers of integers or bytes; masks are bools, tables of positions floats.
    for buffer in module.buffers(recurse=False):
        is_table = buffer.is_floating_point() and buffer.element_size() > 1
        if not is_table and buffer.dtype != torch.bool:
            weights.append(buffer)
    return any(weight.dim() > 1 for weight in weights)
