"""Train, score and evaluate with eight gloo processes and with one, and count what they send.

What is compared: `python -m benchmarks.experiments.eight_processes`, and docs/scaling.md.
"""

from benchmarks.experiments.eight_processes import MOST_OFF, Size, compare
from benchmarks.harness import Claim, Measured, alone

CLAIM = Claim(
    "several processes have the weights, store and answers of one, and send the formulas' bytes",
    at_most=MOST_OFF,
    unit="%",
)
FULL, SMALL = Size(), Size(processes=4, steps=2, hidden=128)
TINY = Size(processes=2, steps=2, hidden=64)


def measure(size: Size) -> Measured:
    """Return the largest share by which the bytes of a step are off."""
    found = alone(compare, size)
    lines = (f"{row[0]:22}" + "  ".join(row[1:]) for table in found.tables for row in table)
    return Measured(found.off, tuple(lines), found.broken)
