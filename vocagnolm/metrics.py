"""What a run reports about its guidance, summed on the device and read once per log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BIN_NATS = 0.01
_BINS = 4001  # excess losses from -20 to 20 nats; those beyond count in the outermost bins
_QUANTILES = (0.1, 0.5, 0.9)
_NONE = -1
_SUMS = (
    "label_tokens",
    "student_loss",
    "selected_tokens",
    "selected_loss",
    "teacher_tokens",
    "teacher_loss",
    "mapped_tokens",
    "distances",
    "distance",
    "teacher_seconds",
)


class GuidanceMetrics:
    """Sums over the tokens since the last `read`. Adding waits for nothing; reading waits once.

    Args:
        device: where the losses live.

    Attributes:
        bad_blocks: int64 [2], on the device: a block on which the student's, and the teacher's,
            losses were not finite; -1 while there is none.
    """

    def __init__(self, device: torch.device):
        # MPS has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._device = device
        self._teacher_clock = Stopwatch(device)
        self._clear()

        self.bad_blocks = torch.full((2,), _NONE, device=device)

    def _clear(self) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=self._dtype, device=self._device)
        self._histogram = torch.zeros(_BINS, dtype=self._dtype, device=self._device)
        self._since: float | None = None

    def start(self) -> None:
        """Mark the beginning of an optimizer step; the first one after a log starts the clock.

        So evaluation and saving count where they fall between two logs, and not where they follow
        one.
        """
        if self._since is None:
            self._since = time.perf_counter()

    @contextmanager
    def time_teacher(self) -> Iterator[None]:
        """Count what runs inside as the teacher's time."""
        with self._teacher_clock.running():
            yield

    def add_student(
        self, loss_BS: Tensor, valid_BS: Tensor, weight_BS: Tensor, block_B: Tensor
    ) -> None:
        """Count the student's losses [B, S], which tokens have one, and their weights."""
        loss_BS = loss_BS.detach()
        self._note_bad(0, loss_BS, block_B)
        self._add(
            label_tokens=valid_BS,
            student_loss=loss_BS * valid_BS,
            selected_tokens=weight_BS,
            selected_loss=loss_BS * weight_BS,
        )

    def add_teacher(self, loss_BT: Tensor, valid_BT: Tensor, block_B: Tensor) -> None:
        """Count the teacher's own losses [B, T]."""
        self._note_bad(1, loss_BT, block_B)
        self._add(teacher_tokens=valid_BT, teacher_loss=loss_BT * valid_BT)

    def add_distances(self, distance_R: Tensor, loss_BS: Tensor, block_B: Tensor) -> None:
        """Count the distances of the student's distributions from the teacher's.

        One that is not finite is the teacher's fault where the student's losses [B, S] are finite.
        """
        distance_R = distance_R.detach()
        is_blameless = loss_BS.detach().isfinite().all()
        self._note_bad(1, distance_R.where(is_blameless, 0.0)[None], block_B[:1])
        self._add(distances=torch.ones_like(distance_R), distance=distance_R)

    def add_excess(self, excess_BS: Tensor, mapped_BS: Tensor) -> None:
        """Count the excess losses [B, S] of the label tokens that have a teacher loss."""
        self._add(mapped_tokens=mapped_BS)
        bins = (excess_BS.detach() / _BIN_NATS).round().nan_to_num() + _BINS // 2
        bins = bins.clamp(0, _BINS - 1).long().flatten()
        self._histogram.index_add_(0, bins, mapped_BS.flatten().to(self._dtype))

    def _note_bad(self, model: int, loss: Tensor, block_B: Tensor) -> None:
        is_bad_B = ~loss.isfinite().all(-1)
        worst = block_B.where(is_bad_B, _NONE).max()
        self.bad_blocks[model] = self.bad_blocks[model].maximum(worst)

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._sums[_SUMS.index(name)] += value.sum(dtype=self._dtype)

    def read(self, reduce: Callable[[Tensor], Tensor], world_size: int) -> dict[str, float]:
        """Average over all processes and forget.

        Args:
            reduce: sums a tensor over the processes; every process must call `read`.
            world_size: how many they are.

        Returns:
            Losses in nats per token, shares in [0, 1], quantiles to within 0.005 nats; the mean
            distance in nats for KL. Teacher entries only where a teacher was counted.
        """
        elapsed_s = time.perf_counter() - self._since if self._since else 0.0
        self._sums[_SUMS.index("teacher_seconds")] = self._teacher_clock.read()
        both = reduce(torch.cat([self._sums, self._histogram])).cpu()
        sums = dict(zip(_SUMS, both[: len(_SUMS)].tolist(), strict=True))
        histogram = both[len(_SUMS) :]
        self._clear()
        tokens = max(sums["label_tokens"], 1.0)
        report = {
            "student_loss_nats": sums["student_loss"] / tokens,
            "selected_loss_nats": sums["selected_loss"] / max(sums["selected_tokens"], 1.0),
            "selected_fraction": sums["selected_tokens"] / tokens,
        }
        if elapsed_s:
            report["tokens_per_s"] = sums["label_tokens"] / elapsed_s
        if sums["distances"]:
            report["distance_from_teacher"] = sums["distance"] / sums["distances"]
        if elapsed_s and sums["teacher_seconds"]:
            report["teacher_time_fraction"] = sums["teacher_seconds"] / world_size / elapsed_s
        if sums["teacher_tokens"]:
            report["teacher_loss_nats"] = sums["teacher_loss"] / sums["teacher_tokens"]
            report["teacher_tokens_per_student_token"] = sums["teacher_tokens"] / tokens
            report["unmapped_fraction"] = 1.0 - sums["mapped_tokens"] / tokens
            report |= _quantiles(histogram)
        return report


def _quantiles(histogram: Tensor) -> dict[str, float]:
    cumulative = histogram.cumsum(0)
    if not cumulative[-1]:
        return {}
    at = torch.tensor(_QUANTILES, dtype=cumulative.dtype) * cumulative[-1]
    values = (torch.searchsorted(cumulative, at) - _BINS // 2) * _BIN_NATS
    names = (f"excess_loss_p{round(100 * quantile)}_nats" for quantile in _QUANTILES)
    return dict(zip(names, values.tolist(), strict=True))


class Stopwatch:
    """Seconds spent in a part of the work; on CUDA from events, which wait for nothing."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what runs inside."""
        if self._cuda:
            start, stop = _event(), _event()
            start.record()
            yield
            stop.record()
            self._events.append((start, stop))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def read(self) -> float:
        """Seconds since the last read. Waits for the device."""
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds: float = sum(a.elapsed_time(b) for a, b in self._events)
        seconds = self._seconds + milliseconds / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
