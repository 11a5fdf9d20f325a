"""How fast a run is: tokens per second, MFU, memory.

MFU is FLOPs of student and teachers / (seconds x peak FLOP/s), by `vocagnolm.models.cost`.
"""

import logging
import re
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.fields import named
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
    """Measures the steps of a run, with a host-device sync per log and save.

    Time counts from the first step after a log to the next log. So evaluations and saves right
    after a log cost no time.

    Args:
        teachers: the models whose FLOPs count besides the student's.
        tflops: the peak of one device in dense bfloat16; looked up by default. Without, no MFU.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        teachers: Sequence[PreTrainedModel],
        tflops: float | None = None,
    ):
        self._accelerator, self._device = accelerator, accelerator.device
        self._teachers = teachers
        if tflops is None and self._device.type == "cuda":
            name = torch.cuda.get_device_name(self._device)
            tflops = peak_tflops(name)
            if tflops is None:
                option = named("device_peak_tflops")
                logger.warning("no MFU: the peak of %s is unknown: give %s", name, option)
        self._tflops = tflops
        # The costs of the student and then of each teacher. The list is empty if one of them cannot
        # be counted, because an MFU without one model would mislead.
        self._works: list[ModelWork] = []
        # By model, the sums since the last `new_flops`: tokens with a loss, their keys, and the
        # tokens that a head reads. They stay on the device, so no micro-batch waits.
        self._counts: dict[int, Tensor] = {}
        # The student's label tokens, and all FLOPs, since the last `read`.
        self._tokens = self._flops = 0
        # None means that the clock is stopped: nothing was timed since the last log.
        self._since: float | None = None

    def on_train_begin(self, *args: object, **kwargs: Any) -> None:
        """Count the weights of all models, and forget an earlier run."""
        self._tokens, self._flops, self._since = 0, 0, None
        try:
            self._works = [model_work(model) for model in (kwargs["model"], *self._teachers)]
        except ValueError as error:
            self._works = []
            logger.warning(
                "no MFU, and total_flos is Trainer's estimate for the student: %s", error
            )

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        """Start the clock if a log has stopped it."""
        if self._since is None:
            self._since = time.perf_counter()

    def count(
        self, model: int, position_BT: Tensor, label_BT: Tensor, head_tokens: int | None = None
    ) -> None:
        """Count a micro-batch of the student, 0, or a teacher. By default a head reads all."""
        valid_BT = label_BT != IGNORED_LABEL
        # A label token at position p of its document is predicted from the p tokens before it.
        tokens, keys = valid_BT.sum(), (position_BT * valid_BT).sum()
        head = tokens if head_tokens is None else torch.full_like(tokens, head_tokens)
        counts = torch.stack([tokens, keys, head])
        self._counts[model] = self._counts.get(model, 0) + counts

    def new_flops(self) -> int | None:
        """Return this process's FLOPs since the last call, or None if a model has no count."""
        counts = {model: sums.tolist() for model, sums in self._counts.items()}
        self._counts = {}
        if 0 in counts:
            self._tokens += counts[0][0]
        if not self._works:
            return None
        flops = 0
        for model, sums in counts.items():
            work = self._works[model]
            count = work.forward_flops if model else work.training_flops
            flops += int(count(*sums))
        self._flops += flops
        return flops

    def read(self) -> dict[str, float]:
        """Return all measures since the last read, up to the last `new_flops`.

        All processes call this. Memory is the most of any process, in GiB. Outside of training, the
        result is empty.
        """
        if self._since is None:
            return {}
        memory = _memory_gib(self._device)
        # A row of each process: [ sums ... | memory ... ], added up and maximised.
        row = [time.perf_counter() - self._since, self._tokens, self._flops, *memory.values()]
        self._since, self._tokens, self._flops = None, 0, 0
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        rows = self._accelerator.gather(torch.tensor([row], dtype=dtype, device=self._device)).cpu()
        elapsed_s, tokens, flops = rows[:, :3].sum(0).tolist()
        # The times are sums over processes, so multiplying by their number gives the rate of all.
        report = {"tokens_per_s": tokens / elapsed_s * len(rows)}
        # Both FLOPs and seconds are sums over devices, so the peak of one device is right.
        if self._tflops and flops:
            report["mfu"] = flops / (elapsed_s * self._tflops * 1e12)
        return report | dict(zip(memory, rows[:, 3:].amax(0).tolist(), strict=True))


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
