"""Grade outputs that are meant to hang, crash or take over the grader, one by one.

Outputs and golds are made of LaTeX, code, digits, Unicode and nesting. Each must get a verdict in
seconds of processor time and 1 GiB of memory, and none may write the file that many of them ask
for, in the directory of this process or that of the workers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path

from benchmarks.experiments.grading import fuzz
from benchmarks.harness import Claim, Measured
from vocagnolm.evaluation.grading.worker import MEMORY_LIMIT_BYTES

CLAIM = Claim(
    "a hostile output takes seconds of processor time, 1 GiB at most, and runs nothing",
    at_most=5,
    unit="s",
)


@dataclass(frozen=True)
class Size:
    """Hostile outputs and their seed."""

    outputs: int = 6000
    seed: int = 1
    shards: int = 2


# Where workers run, and this very file is.
ROOT = Path(__file__).resolve().parents[2]
FULL, SMALL, TINY = Size(), Size(outputs=300), Size(outputs=20, shards=1)


def measure(size: Size) -> Measured:
    """Return the processor time of the slowest verdict, in seconds."""
    places = (Path.cwd(), ROOT)
    before = [set(place.iterdir()) for place in places]
    graded, memory = fuzz(size.outputs, size.seed, size.shards)
    written = [
        str(x)
        for place, old in zip(places, before, strict=True)
        for x in set(place.iterdir()) - old
    ]
    decided = Counter(one.verdict.decided_by for one in graded)
    details = [
        f"{len(graded)} outputs, decided by {dict(decided)}",
        f"largest memory of a worker {memory / 2**20:.0f} MiB",
    ]
    details += [
        f"{one.seconds:6.2f} s {one.output[:80]!r} {one.gold[:40]!r}"
        for one in nlargest(5, graded, key=lambda one: one.seconds)
    ]
    broken = f"(written: {', '.join(written)})" if written else ""
    if memory > MEMORY_LIMIT_BYTES:
        broken += f"(a worker took {memory:,} bytes)"
    return Measured(max(one.seconds for one in graded), tuple(details), broken)
