"""Name the phase that a run is in: words for its error line, and the clock of its throughput."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

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
