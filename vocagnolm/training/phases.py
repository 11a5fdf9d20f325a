"""The phase that a run is in: words for its error line, and the clock of its throughput."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

SHARES = ("teacher", "student", "optimizer", "data", "other")  # of the time of training


class _Phase(NamedTuple):
    """The share that its time counts for, None where it is no training; and its words."""

    share: str | None
    doing: str


_PHASES: dict[str, _Phase] = {
    "preparation": _Phase(None, "the preparation"),
    "data": _Phase("data", "the reading of the data"),
    "teacher": _Phase("teacher", "the teacher's forward"),
    "student": _Phase("student", "the student's forward"),
    "backward": _Phase("student", "the student's backward, where gradients are exchanged"),
    "agreement": _Phase("student", "the agreement of the processes on the update"),
    "update": _Phase("optimizer", "the update"),
    "other": _Phase("other", "the end of a step"),
    "evaluation": _Phase(None, "an evaluation"),
    "checkpoint": _Phase(None, "the saving of a checkpoint"),
    "model": _Phase(None, "the saving of the model"),
}


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
        return _PHASES[self._name].doing

    def begin(self, name: str) -> None:
        """Leave the phase for another one."""
        before, self._name = _PHASES[self._name].share, name
        if self.is_timed and _PHASES[name].share != before:
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
            if share is not None:
                seconds[share] += _seconds_between(start, stop)
        del self._marks[:-1]
        return seconds

    def _mark(self) -> None:
        self._marks.append((_PHASES[self._name].share, self._now()))

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds_between(start: float | torch.cuda.Event, stop: float | torch.cuda.Event) -> float:
    if isinstance(start, float) and isinstance(stop, float):
        return stop - start
    assert not isinstance(start, float)
    assert not isinstance(stop, float)
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1000
