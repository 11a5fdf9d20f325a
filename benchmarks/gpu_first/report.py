"""Print each line of a run, and append it to a file as JSON, as soon as it is known."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.models import has_cuda

FILE = "gpu_first.jsonl"
_GIB = 2**30


@dataclass
class Report:
    """The output of a run, what all stages share, and the time that is left.

    Attributes:
        is_tiny: whether models are small enough for a CPU.
        minutes: no stage and no kernel starts after them.
        temporary: a directory that the run deletes at its end.
    """

    output_dir: Path
    is_tiny: bool
    minutes: float
    temporary: Path
    stage: str = "-"
    began_s: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device("cpu" if self.is_tiny and not has_cuda() else "cuda")

    @property
    def minutes_left(self) -> float:
        """The minutes until nothing new starts."""
        return self.minutes - (time.monotonic() - self.began_s) / 60

    def say(self, what: str, value: object = "", **more: object) -> None:
        """Print one line, and append it to the file."""
        at = round(time.monotonic() - self.began_s, 1)
        shown = " ".join([_short(value), *(f"{key}={_short(x)}" for key, x in more.items())])
        sys.stdout.write(f"[{at:6.1f}] {self.stage} | {what}: {shown}\n")
        sys.stdout.flush()
        line = {"at_s": at, "stage": self.stage, "what": what, "value": value, **more}
        with (self.output_dir / FILE).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def scratch(self) -> str:
        """Make a directory that is deleted with the run."""
        return tempfile.mkdtemp(dir=self.temporary)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Print any failure, so that the next part can run."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.say(f"{name}: out of memory", str(error)[:160])
        except Exception as error:  # noqa: BLE001 - any failure, so that the other parts still run
            where = "".join(traceback.format_exception(error)[-4:])[-1200:]
            self.say(f"{name}: FAILED", f"{type(error).__name__}: {error}"[:600], where=where)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a function takes, and the GPU's peak memory in GiB."""
    if has_cuda():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start_s = time.perf_counter()
    run()
    if has_cuda():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start_s
    return seconds, torch.cuda.max_memory_allocated() / _GIB if has_cuda() else 0.0


def free_memory() -> None:
    """Free unused memory."""
    gc.collect()
    if has_cuda():
        torch.cuda.empty_cache()
