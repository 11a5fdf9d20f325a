"""How fast a run is and where its time goes: tokens, MFU, phases and memory, once per log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]  # accelerate needs it too
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.training.flops import ModelWork, model_work, peak_tflops

if TYPE_CHECKING:
    from vocagnolm.trainer import VocAgnoTrainer

logger = logging.getLogger(__name__)

PHASES = ("teacher", "student", "optimizer", "data", "other")
# All that a log may get from here; none of it is the same in another run.
TIMING_KEYS = (
    *(f"{role}_{what}" for role in PHASES[:2] for what in ("tokens_per_s_per_device", "mfu")),
    *(f"{phase}_time_fraction" for phase in PHASES),
    *(f"memory_{kind}_gib" for kind in ("allocated", "reserved", "resident")),
)
_OUTSIDE = "outside"  # evaluation and saving, which are not training
_GIB = 2**30


class _Timeline:
    """Splits a device's time without a gap; marking waits for nothing, as events do on CUDA."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def start(self) -> None:
        """Forget what was, and begin."""
        self._marks = []
        self.mark(_OUTSIDE)

    def mark(self, phase: str) -> None:
        """Say what the time since the last mark was spent on."""
        self._marks.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds of each phase since the last read. Waits for the device."""
        if self._cuda:
            self._marks[-1][1].synchronize()
        seconds = dict.fromkeys((*PHASES, _OUTSIDE), 0.0)
        for (_, start), (phase, stop) in pairwise(self._marks):
            seconds[phase] += start.elapsed_time(stop) / 1000 if self._cuda else stop - start
        del seconds[_OUTSIDE], self._marks[:-1]
        return seconds


class _Counter:
    """What passed through a model: tokens with a loss, their keys, and those that the head cost."""

    def __init__(self, model: nn.Module, device: torch.device):
        self._counts = torch.zeros(3, dtype=torch.int64, device=device)
        try:
            self.work: ModelWork | None = model_work(model)
        except ValueError as error:
            logger.warning("no MFU is reported: %s", error)
            self.work = None

    def add(self, inputs: Mapping[str, Any], head_tokens: int | None) -> None:
        """Count a forward pass, on the device.

        A label token at position p of its document takes the p tokens before it to predict.

        Args:
            inputs: `position_ids` [B, T], and `labels` [B, T] if the losses are made here.
            head_tokens: those that the head counts for, if not all.
        """
        position_BT, label_BT = inputs["position_ids"], inputs.get("labels")
        valid_BT = position_BT > 0 if label_BT is None else label_BT != IGNORED_LABEL
        tokens, keys = valid_BT.sum(), (position_BT * valid_BT).sum()
        self._counts += torch.stack(
            [tokens, keys, tokens if head_tokens is None else torch.full_like(tokens, head_tokens)]
        )

    def read(self) -> list[int]:
        """The three counts since the last read."""
        counts: list[int] = self._counts.tolist()
        self._counts.zero_()
        return counts


class Throughput(TrainerCallback):
    """Measures training without waiting for the device before `read`, which waits once.

    Time is the device's: on a GPU it is taken by events on its stream, so that work of the host
    which the GPU does not wait for costs nothing, and waiting for data shows as that. The phases:

    - `teacher`: the forward passes of resident teachers;
    - `student`: forward, backward, and all between them and the optimizer, such as the guidance,
      clipping, and gradients reduced over processes (for `kld` and `uld` also the teacher's head);
    - `optimizer`; `data`, from the end of one step to the batches of the next; `other`.

    Evaluation and saving count nowhere.

    Args:
        trainer: what is measured, from the next `train` on.
        peak: of one device in dense bfloat16, in TFLOP/s; by default what `peak_tflops` knows of
            the GPU. Without it there is no MFU.
    """

    def __init__(self, trainer: VocAgnoTrainer, peak: float | None = None):
        self._trainer = trainer
        self._device = trainer.args.device
        self._peak_flops = _peak_flops(self._device, peak)
        self._timeline = _Timeline(self._device)
        self._handles: list[RemovableHandle] = []
        self._is_in_step = False
        self._depth = 0  # of the teacher's modules that are running

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Watch the models, unless nothing is ever logged."""
        self._remove_hooks()
        if args.logging_strategy == IntervalStrategy.NO:
            return
        self._student = _Counter(self._trainer.model, self._device)
        self._teachers = []
        self._watch(self._trainer.model, self._before_student)
        for teacher in getattr(self._trainer.teacher, "models", ()):
            self._teachers.append(_Counter(teacher, self._device))
            for module in dict.fromkeys((teacher, teacher.base_model)):  # some calls skip the head
                self._watch(module, partial(self._before_teacher, self._teachers[-1], teacher))
                after = module.register_forward_hook(self._after_teacher, always_call=True)
                self._handles.append(after)
        self._timeline.start()

    def _watch(self, module: nn.Module, before: Callable[..., None]) -> None:
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before_student(self, module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if self._is_in_step:
            self._student.add(inputs, inputs.get("weighted_tokens"))

    def _before_teacher(
        self,
        counter: _Counter,
        teacher: nn.Module,
        module: nn.Module,
        args: Any,
        inputs: dict[str, Any],
    ) -> None:
        if self._is_in_step and not self._depth:
            self._timeline.mark("student")
            counter.add(inputs, None if module is teacher else 0)
        self._depth += 1

    def _after_teacher(self, *args: Any) -> None:
        self._depth -= 1
        if self._is_in_step and not self._depth:
            self._timeline.mark("teacher")

    def _mark(self, phase: str, is_in_step: bool = False) -> None:
        if self._handles:
            self._timeline.mark(phase)
            self._is_in_step = is_in_step

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """End what lies between two epochs."""
        self._mark("other")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """End the wait for data."""
        self._mark("data", is_in_step=True)

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """End a micro-batch."""
        self._mark("student", is_in_step=True)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """End the last micro-batch."""
        self._mark("student")

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """End the update."""
        self._mark("optimizer")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """End what other callbacks do at the end of a step."""
        self._mark("other")

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """End what other callbacks do with a log; an evaluation, which logs too, goes on."""
        if "loss" in kwargs["logs"]:
            self._mark("other")

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._mark(_OUTSIDE)

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        """Leave the saving out."""
        self._mark(_OUTSIDE)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave the models as they were."""
        self._remove_hooks()

    def read(self) -> dict[str, float]:
        """What was measured since the last read; every process must call it.

        Returns:
            Empty outside of `train`. Tokens with a loss per second and device, of the student and,
            if it is resident, of the teacher; `student_mfu` of all but the teacher, the data and
            `other`, and `teacher_mfu` of the teacher's forward passes, where they are known;
            `{phase}_time_fraction`, which sum to 1; the most memory of any process, in GiB:
            allocated and reserved on a GPU since the last read, or held now on the host.
        """
        if not self._handles:
            return {}
        self._mark("other")
        seconds = self._timeline.read()
        student, teachers = self._student, self._teachers
        ours, theirs = student.read(), [teacher.read() for teacher in teachers]
        sums = {f"{phase}_s": value for phase, value in seconds.items()}
        sums |= {"student_tokens": ours[0], "teacher_tokens": sum(counts[0] for counts in theirs)}
        if student.work is not None:
            sums["student_flops"] = student.work.training_flops(*ours)
        works = [teacher.work for teacher in teachers if teacher.work is not None]
        if works and len(works) == len(teachers):
            pairs = zip(works, theirs, strict=True)
            sums["teacher_flops"] = sum(work.forward_flops(*counts) for work, counts in pairs)
        memory = _memory_gib(self._device)
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        values = torch.tensor([[*sums.values(), *memory.values()]], dtype=dtype)
        rows = self._trainer.accelerator.gather(values.to(self._device)).cpu()
        totals = dict(zip(sums, rows.sum(0).tolist(), strict=False))
        largest = dict(zip(memory, rows.amax(0)[len(sums) :].tolist(), strict=True))
        return _rates(totals, self._peak_flops) | largest


def _peak_flops(device: torch.device, peak: float | None) -> float | None:
    """The peak that is given, or else that of a GPU which is known, in FLOP/s."""
    if peak is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = peak_tflops(name)
        if peak is None:
            logger.warning(
                "no MFU is reported: the peak of %s is unknown; give it with --device_peak_tflops",
                name,
            )
    return None if peak is None else peak * 1e12


def _memory_gib(device: torch.device) -> dict[str, float]:
    """Memory of this process, in GiB."""
    if device.type != "cuda":
        return {"memory_resident_gib": psutil.Process().memory_info().rss / _GIB}
    memory = {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return memory


def _rates(totals: Mapping[str, float], peak: float | None) -> dict[str, float]:
    """Rates and shares from sums over the processes, in tokens, FLOPs and seconds."""
    by_phase = {phase: totals[f"{phase}_s"] for phase in PHASES}
    elapsed_s = sum(by_phase.values())
    report = {}
    for role, busy_s in (
        ("student", by_phase["student"] + by_phase["optimizer"]),
        ("teacher", by_phase["teacher"]),
    ):
        tokens, flops = totals[f"{role}_tokens"], totals.get(f"{role}_flops")
        if tokens:
            report[f"{role}_tokens_per_s_per_device"] = tokens / elapsed_s
        if tokens and flops and peak:
            report[f"{role}_mfu"] = flops / (busy_s * peak)
    if not totals["teacher_tokens"]:
        del by_phase["teacher"]
    return report | {f"{phase}_time_fraction": s / elapsed_s for phase, s in by_phase.items()}
