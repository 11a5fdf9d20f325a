"""Lines of a run: each is printed, and appended to a file as JSON, as soon as it is known."""

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
    """Where lines go, what all stages share, and the time that is left.

    Attributes:
        is_tiny: the smallest models, which a CPU can run.
        minutes: no stage and no kernel begins after them.
        temporary: a directory that the run removes.
    """

    output_dir: Path
    is_tiny: bool
    minutes: float
    temporary: Path
    stage: str = "-"
    began_s: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """The device that is looked at."""
        return torch.device("cpu" if self.is_tiny and not has_cuda() else "cuda")

    @property
    def minutes_left(self) -> float:
        """Minutes until nothing new begins."""
        return self.minutes - (time.monotonic() - self.began_s) / 60

    def say(self, what: str, value: object = "", **more: object) -> None:
        """Print one thing, and append it to the file."""
        at = round(time.monotonic() - self.began_s, 1)
        shown = " ".join([_short(value), *(f"{key}={_short(x)}" for key, x in more.items())])
        sys.stdout.write(f"[{at:6.1f}] {self.stage} | {what}: {shown}\n")
        sys.stdout.flush()
        line = {"at_s": at, "stage": self.stage, "what": what, "value": value, **more}
        with (self.output_dir / FILE).open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")

    def scratch(self) -> str:
        """Make a directory that goes with the run."""
        return tempfile.mkdtemp(dir=self.temporary)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Print what goes wrong, so that the next thing can run."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.say(f"{name}: out of memory", str(error)[:160])
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ways are to run
            where = "".join(traceback.format_exception(error)[-4:])[-1200:]
            self.say(f"{name}: FAILED", f"{type(error).__name__}: {error}"[:600], where=where)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that something takes, and the most memory of the GPU in GiB."""
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
    """Give back what nobody holds."""
    gc.collect()
    if has_cuda():
        torch.cuda.empty_cache()
