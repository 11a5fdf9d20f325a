"""Name the phase that a run is in, and report its rates, MFU, shares of time and memory per log."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import psutil  # type: ignore[import-untyped]  # accelerate needs it too
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.host.trackers import TRACKED_NAMES
from vocagnolm.run.flops import ModelWork, model_work, peak_flops

logger = logging.getLogger(__name__)

SHARES = ("teacher", "student", "optimizer", "data", "other")  # of the time of training
# The share that a phase's time counts for, None where it is no training; and its words.
_PHASES: dict[str, tuple[str | None, str]] = {
    "preparation": (None, "the preparation"),
    "data": ("data", "the reading of the data"),
    "teacher": ("teacher", "the teacher's forward"),
    "student": ("student", "the student's forward"),
    "backward": ("student", "the student's backward, where gradients are exchanged"),
    "agreement": ("student", "the agreement of the processes on the update"),
    "update": ("optimizer", "the update"),
    "other": ("other", "the end of a step"),
    "evaluation": (None, "an evaluation"),
    "checkpoint": (None, "the saving of a checkpoint"),
    "model": (None, "the saving of the model"),
}
# Entries of a log that depend on the clock and the machine, and differ from run to run.
TIMING_KEYS = [
    entry
    for entry, name in TRACKED_NAMES.items()
    if name.startswith(("speed/", "memory/")) and entry != "total_flos"
]
_GIB = 2**30


class Phases:
    """Splits a device's time into phases without a gap; changing waits for nothing.

        begin     data     student   teacher   student        update  other
        share     |  data  | student | teacher |    student   |  opt. | other ...

    On a GPU the time is that of events on its stream, so that work of the host which the GPU does
    not wait for costs nothing, and waiting for data shows as that. A clock runs between `start` and
    `stop` only.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._name = "preparation"
        self._marks: list[tuple[str | None, float | torch.cuda.Event]] = []
        self.is_timed = False

    @property
    def doing(self) -> str:
        """Words for the message of an error that ends the run here."""
        return _PHASES[self._name][1]

    def begin(self, name: str) -> None:
        """Leave the phase for another one."""
        before, self._name = _PHASES[self._name][0], name
        if self.is_timed and _PHASES[name][0] != before:
            self._mark()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Enter a phase, and come back to this one; after an error the run stays in it."""
        before = self._name
        self.begin(name)
        yield
        self.begin(before)

    def start(self) -> None:
        """Start the clock."""
        self._marks, self.is_timed = [], True
        self._mark()

    def stop(self) -> None:
        """Stop the clock."""
        self._marks, self.is_timed = [], False

    def read(self) -> dict[str, float]:
        """Return the seconds of each share since the last read. Waits for the device."""
        self._mark()
        last = self._marks[-1][1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        seconds = dict.fromkeys(SHARES, 0.0)
        for (share, start), (_, stop) in pairwise(self._marks):
            if share is None:
                continue
            if isinstance(start, float) and isinstance(stop, float):
                seconds[share] += stop - start
            elif not isinstance(start, float) and not isinstance(stop, float):
                seconds[share] += start.elapsed_time(stop) / 1000
        del self._marks[:-1]
        return seconds

    def _mark(self) -> None:
        self._marks.append((_PHASES[self._name][0], self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Counter:
    """Counts of a model's tokens with a loss, of their keys, and of the tokens its head reads."""

    def __init__(self, model: PreTrainedModel, device: torch.device):
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        self.work: ModelWork | None = None
        try:
            self.work = model_work(model)
        except ValueError as error:
            logger.warning("no MFU is reported: %s", error)

    def add(self, position_BT: Tensor, label_BT: Tensor, head_tokens: int | None) -> None:
        """Count a forward pass, on the device; its head reads all tokens by default."""
        valid_BT = label_BT != IGNORED_LABEL
        # A label token at position p of its document is predicted from the p tokens before it.
        tokens, keys = valid_BT.sum(), (position_BT * valid_BT).sum()
        head = tokens if head_tokens is None else torch.full_like(tokens, head_tokens)
        self._counts += torch.stack([tokens, keys, head])

    def read(self) -> list[int]:
        """Return the three counts since the last read."""
        counts: list[int] = self._counts.tolist()
        self._counts.zero_()
        return counts


class Throughput(TrainerCallback):
    """Measure training without waiting for the device before `read`, which waits once.

    `teacher` is its forward pass alone; `student` is forward, backward, and all between them and
    the optimizer, such as the guidance, clipping, and gradients reduced over processes (for `kld`
    and `uld` also the teacher's head).

    Args:
        phases: clock of the run, started and stopped here.
        gather: stacks the rows of all processes.
        peak: of one device in dense bfloat16, in TFLOP/s; looked up by default. Without, no MFU.
        overlaps: the teacher computes beside the student, so each MFU is of the time of both.
    """

    def __init__(
        self,
        phases: Phases,
        device: torch.device,
        teachers: Sequence[PreTrainedModel],
        gather: Callable[[Tensor], Tensor],
        peak: float | None = None,
        overlaps: bool = False,
    ):
        self._phases, self._device, self._models, self._gather = phases, device, teachers, gather
        self._peak_flops, self._overlaps = peak_flops(device, peak), overlaps

    def on_train_begin(self, args: TrainingArguments, *rest: object, **kwargs: object) -> None:
        """Start the clock, unless nothing is ever logged."""
        if args.logging_strategy == IntervalStrategy.NO:
            return
        models = (cast(PreTrainedModel, kwargs["model"]), *self._models)
        self._counters = [_Counter(model, self._device) for model in models]
        self._phases.begin("other")
        self._phases.start()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """Stop the clock."""
        self._phases.stop()

    def count(self, model: int, position_BT: Tensor, label_BT: Tensor, head: int | None) -> None:
        """Count a micro-batch of the student, 0, or of a teacher, and the tokens its head reads."""
        if self._phases.is_timed:
            self._counters[model].add(position_BT, label_BT, head)

    def read(self) -> dict[str, float]:
        """Return all measures since the last read, {} outside of `train`; every process calls it.

        Tokens with a loss per second and device, of the student and of resident teachers;
        `student_mfu` of all but the teacher, the data and `other`, and `teacher_mfu` of the
        teacher's forward passes, where they are known; shares of the time, which sum to 1; the most
        memory of any process in GiB, on a GPU since the last read, on the host now.
        """
        if not self._phases.is_timed:
            return {}
        seconds = self._phases.read()
        ours, *theirs = (counter.read() for counter in self._counters)
        work, *works = (counter.work for counter in self._counters)
        sums = {f"{share}_s": value for share, value in seconds.items()}
        sums |= {"student_tokens": ours[0], "teacher_tokens": sum(counts[0] for counts in theirs)}
        if work is not None:
            sums["student_flops"] = work.training_flops(*ours)
        if theirs and None not in works:
            pairs = zip(filter(None, works), theirs, strict=True)
            sums["teacher_flops"] = sum(one.forward_flops(*counts) for one, counts in pairs)
        memory = _memory_gib(self._device)
        # One row of each process: [ sums ... | memory ... ], added up and maximised.
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        row = torch.tensor([[*sums.values(), *memory.values()]], dtype=dtype)
        rows = self._gather(row.to(self._device)).cpu()
        totals = dict(zip(sums, rows.sum(0).tolist(), strict=False))
        largest = dict(zip(memory, rows.amax(0)[len(sums) :].tolist(), strict=True))
        return _rates(totals, self._peak_flops, self._overlaps) | largest


def _memory_gib(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"memory_resident_gib": psutil.Process().memory_info().rss / _GIB}
    memory = {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return memory


def _rates(totals: Mapping[str, float], peak: float | None, overlaps: bool) -> dict[str, float]:
    """Rates and shares from sums over the processes, in tokens, FLOPs and seconds."""
    by_phase = {share: totals[f"{share}_s"] for share in SHARES}
    elapsed_s = sum(by_phase.values())
    student_s, teacher_s = by_phase["student"] + by_phase["optimizer"], by_phase["teacher"]
    if overlaps:
        student_s = teacher_s = student_s + teacher_s
    report = {}
    for role, busy_s in (("student", student_s), ("teacher", teacher_s)):
        tokens, flops = totals[f"{role}_tokens"], totals.get(f"{role}_flops")
        if tokens:
            report[f"{role}_tokens_per_s_per_device"] = tokens / elapsed_s
        if tokens and flops and peak:
            report[f"{role}_mfu"] = flops / (busy_s * peak)
    if not totals["teacher_tokens"]:
        del by_phase["teacher"]
    return report | {f"{phase}_time_fraction": s / elapsed_s for phase, s in by_phase.items()}
