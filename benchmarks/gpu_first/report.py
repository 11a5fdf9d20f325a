"""Print each line of a run, and append it to the run's file as JSON, as soon as it is known."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import vocagnolm
from benchmarks.harness import Skipped
from benchmarks.models import has_cuda

DONE, SKIPPED, FAILED = "done", "skipped", "FAILED"
_GIB = 2**30


@dataclass
class Report:
    """The output of one stage of a run.

    Attributes:
        file: gets the lines of all stages, over all calls.
        is_tiny: whether models are small enough for a CPU.
        temporary: a directory that is deleted later.
    """

    file: Path
    stage: str
    is_tiny: bool
    temporary: Path
    began_s: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device("cpu" if self.is_tiny and not has_cuda() else "cuda")

    def say(self, what: str, value: object = "", **more: object) -> None:
        """Print one line, and append it to the file."""
        at = round(time.monotonic() - self.began_s, 1)
        shown = " ".join([_short(value), *(f"{key}={_short(x)}" for key, x in more.items())])
        sys.stdout.write(f"[{at:6.1f} s] {self.stage} | {what}: {shown}\n")
        sys.stdout.flush()
        line = {"at_s": at, "stage": self.stage, "what": what, "value": value, **more}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Say how a stage ends, whatever happens in it."""
        try:
            yield
        except Skipped as reason:
            self.say(SKIPPED, str(reason))
        except Exception as error:  # noqa: BLE001 - any failure, so that the other stages still run
            where = "".join(traceback.format_exception(error)[-4:])[-1200:]
            self.say(FAILED, f"{type(error).__name__}: {error}"[:600], where=where)
        else:
            self.say(DONE)


Lines = dict[str, dict[str, dict[str, Any]]]


def read(file: Path) -> Lines:
    """Return the lines of each stage by what they are about. The last attempt is what counts."""
    found: Lines = {}
    texts = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for text in texts:
        line = json.loads(text)
        found.setdefault(line["stage"], {})[line["what"]] = line
        if line["what"] == DONE:
            for ended in (FAILED, SKIPPED):
                found[line["stage"]].pop(ended, None)
    return found


def name_run(device: str) -> str:
    """Name a run by the device and by what is measured: other code is another run."""
    home = Path(vocagnolm.__file__).parent
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted(home.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"{device.replace(' ', '-')}-{digest.hexdigest()[:8]}"


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
