"""Grade outputs that are meant to hang, crash or take over the grader, one by one.

Outputs and golds are made of LaTeX, code, digits, Unicode and nesting. Each must get a verdict in
seconds, and none may write the file that many of them ask for. A worker has four seconds of
processor time for one, which may be more on a clock where the machine does other work.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from heapq import nlargest

from benchmarks.experiments.grading import fuzz
from benchmarks.harness import Claim, Measured

CLAIM = Claim("a hostile output has its verdict in seconds and runs nothing", at_most=5, unit="s")


@dataclass(frozen=True)
class Size:
    """Hostile outputs and their seed."""

    outputs: int = 6000
    seed: int = 1
    shards: int = 2


FULL, TINY = Size(), Size(outputs=20, shards=1)


def measure(size: Size) -> Measured:
    """Return the seconds of the slowest verdict."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        try:
            graded = fuzz(size.outputs, size.seed, size.shards)
        finally:
            os.chdir(before)
        written = os.listdir(directory)
    decided = Counter(one.verdict.decided_by for one in graded)
    details = [f"{len(graded)} outputs, decided by {dict(decided)}"]
    details += [
        f"{one.seconds:6.2f} s {one.output[:80]!r} {one.gold[:40]!r}"
        for one in nlargest(5, graded, key=lambda one: one.seconds)
    ]
    broken = f"(written: {', '.join(written)})" if written else ""
    return Measured(max(one.seconds for one in graded), tuple(details), broken)
