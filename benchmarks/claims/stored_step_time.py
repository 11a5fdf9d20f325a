"""Compare the time of a training step with stored teacher losses with that of a CPT step.

The ways are those of `benchmarks.experiments.training_steps`, on a CPU with small random models.
A guided step computes no gradient of the losses that it does not select, which CPT has to:
`--set top_k=1` shows what guidance costs without that.
"""

from __future__ import annotations

from benchmarks.experiments.training_steps import Ratios, Size, ratios
from benchmarks.harness import Claim, Measured

CLAIM = Claim(
    "a step with stored losses takes at most 1.05 times a CPT step",
    at_most=1.05,
    unit="x",
)
FULL = Size()
TINY = Size(documents=8, max_length=64, hidden=64, layers=1, vocabulary=1100, repetitions=2)


def measure(size: Size) -> Measured:
    """Return the ratio of the medians."""
    found: Ratios = ratios(size)
    return Measured(found.stored_time, found.table)
