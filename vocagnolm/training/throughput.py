"""How fast a run is: tokens per second, MFU, memory.

MFU is model FLOPs / (seconds x peak FLOP/s), with the FLOPs of `vocagnolm.models.cost`.
"""

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.models.cost import ModelWork, model_work

logger = logging.getLogger(__name__)

_GIB = 2**30
# Dense bfloat16 TFLOP/s with float32 sums, by words in CUDA's device name. From NVIDIA's data
# sheets (half of "with sparsity") and, for GeForce, its Ada and Ampere white papers.
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
# A chip with one of these words in its name has fewer or slower units than the table's, so its peak
# is unknown.
_OTHER_CHIPS = {"LAPTOP", "MIG", "TI", "D"}


class Throughput(TrainerCallback):
    """Measures the steps of a run, with one host-device sync per `read`.

    Time counts from the first step after a log to the next log. So evaluations and saves right
    after a log cost no time.

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
        # The costs of the student and then of each teacher. The list is empty if one of them cannot
        # be counted, because an MFU without one model would mislead.
        self._works: list[ModelWork] = []
        self._peak_flops = _peak_flops(self._device, peak_tflops)
        self._clear_counts()
        self._clear_times()

    def _clear_counts(self) -> None:
        # One row for the student and for each teacher, with the sums since training began: tokens
        # with a loss, their keys, and the tokens that a head reads. They stay on the device, so no
        # micro-batch waits.
        shape = 1 + len(self._teachers), 3
        self._counts = torch.zeros(shape, dtype=torch.int64, device=self._device)
        # The sums at the last `read` and at the last `new_flops`, from which the next one counts.
        self._counts_at_read = self._counts.clone()
        self._counts_at_flops = self._counts.clone()

    def _clear_times(self) -> None:
        # None means that the clock is stopped: nothing was timed since the last log.
        self._since: float | None = None
        self._teacher_s = 0.0
        # A GPU is still working when the host has moved on, so its teacher is timed by pairs of
        # events.
        self._teacher_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def counts_flops(self) -> bool:
        """True if the FLOPs of all models can be counted, which is known when training begins."""
        return bool(self._works)

    def new_flops(self) -> float:
        """Return this process's FLOPs since the last call, for the student and its teachers."""
        counts = self._counts - self._counts_at_flops
        self._counts_at_flops = self._counts.clone()
        return sum(self._flops(counts.tolist()))

    def on_train_begin(self, *args: object, **kwargs: Any) -> None:
        """Count the weights of all models, and forget an earlier run."""
        self._clear_counts()
        self._clear_times()
        try:
            models = [kwargs["model"]]
            models += self._teachers
            self._works = [model_work(model) for model in models]
        except ValueError as error:
            self._works = []
            logger.warning(
                "no MFU, and total_flos is Trainer's estimate for the student: %s", error
            )

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Start the clock if a log has stopped it."""
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Count the time of what runs inside as the teacher's."""
        # On a CPU, a pass has finished when its call returns.
        if self._device.type != "cuda":
            start_s = time.perf_counter()
            yield
            self._teacher_s += time.perf_counter() - start_s
            return
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Recording does not wait. The two events get their times when the device reaches them.
        start.record()
        yield
        stop.record()
        self._teacher_events.append((start, stop))

    def count(
        self, model: int, position_BT: Tensor, label_BT: Tensor, head_tokens: int | None = None
    ) -> None:
        """Count a micro-batch of the student, 0, or a teacher. By default a head reads all."""
        valid_BT = label_BT != IGNORED_LABEL
        # A label token at position p of its document is predicted from the p tokens before it.
        tokens, keys = valid_BT.sum(), (position_BT * valid_BT).sum()
        head = tokens if head_tokens is None else torch.full_like(tokens, head_tokens)
        self._counts[model] += torch.stack([tokens, keys, head])

    def read(self) -> dict[str, float]:
        """Return all measures since the last read, or {} outside `train`. All processes call this.

        The teacher's MFU is for the time of its forward passes, the student's for all other time.
        Memory is the most of any process, in GiB.
        """
        if self._since is None:
            return {}
        # Read the clock first, so that the reading itself does not count.
        elapsed_s = time.perf_counter() - self._since
        teacher_s = self._teacher_s
        for start, stop in self._teacher_events:
            stop.synchronize()
            # PyTorch gives milliseconds.
            teacher_s += start.elapsed_time(stop) / 1000
        counts = (self._counts - self._counts_at_read).tolist()
        self._counts_at_read = self._counts.clone()
        student_tokens = counts[0][0]
        student_flops, teacher_flops = self._flops(counts)
        self._clear_times()
        memory = _memory_gib(self._device)
        # A row of each process: [ sums ... | memory ... ], added up and maximised.
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        row = [elapsed_s, teacher_s, student_tokens, student_flops, teacher_flops]
        row += memory.values()
        rows = self._accelerator.gather(torch.tensor([row], dtype=dtype, device=self._device)).cpu()
        elapsed_s, teacher_s, tokens, student_flops, teacher_flops = rows[:, :5].sum(0).tolist()
        # The times are sums over processes, so multiplying by their number gives the rate of all.
        report = {"tokens_per_s": tokens / elapsed_s * len(rows)}
        if len(counts) > 1:
            report["teacher_time_fraction"] = teacher_s / elapsed_s
        # Both FLOPs and seconds are sums over devices, so the peak of one device is right.
        if self._peak_flops and student_flops:
            report["student_mfu"] = student_flops / ((elapsed_s - teacher_s) * self._peak_flops)
        if self._peak_flops and teacher_flops:
            report["teacher_mfu"] = teacher_flops / (teacher_s * self._peak_flops)
        for name, most_gib in zip(memory, rows[:, 5:].amax(0).tolist(), strict=True):
            report[name] = most_gib
        return report

    def _flops(self, counts: list[list[int]]) -> tuple[float, float]:
        """Return the FLOPs of the student, and of all teachers, for the tokens that they read."""
        if not self._works:
            return 0.0, 0.0
        student_flops = self._works[0].training_flops(*counts[0])
        teacher_flops = 0.0
        for teacher, teacher_counts in zip(self._works[1:], counts[1:], strict=True):
            teacher_flops += teacher.forward_flops(*teacher_counts)
        return student_flops, teacher_flops


def _memory_gib(device: torch.device) -> dict[str, float]:
    if device.type != "cuda":
        return {"memory_resident_gib": psutil.Process().memory_info().rss / _GIB}
    memory = {
        "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / _GIB,
        "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / _GIB,
    }
    # The next log reports the most memory since this one.
    torch.cuda.reset_peak_memory_stats(device)
    return memory


def peak_tflops(device_name: str) -> float | None:
    """Look up the peak of a GPU in dense bfloat16, in TFLOP/s, or None if it is unknown."""
    # Compare whole words of names, because L4 is part of L40S.
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    matches = [name for name in _PEAK_TFLOPS if words.issuperset(name.split())]
    if not matches or words & _OTHER_CHIPS:
        return None
    # "H200 NVL" says more than "H200".
    most_specific = max(matches, key=lambda name: len(name.split()))
    return _PEAK_TFLOPS[most_specific]


def _peak_flops(device: torch.device, tflops: float | None) -> float | None:
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = peak_tflops(name)
        if tflops is None:
            logger.warning("no MFU: the peak of %s is unknown; give --device_peak_tflops", name)
    return tflops and tflops * 1e12
