"""The law of the experiments: rules are compared only where there is something to gain.

An oracle trains on what is right and on nothing else. What it gains over equal weights is a world's
ceiling. The noise of packing is the standard deviation of equal weights on the same rows in other
orders. Where the ceiling is not at least five times this noise, a difference between two rules says
nothing, and the world's results are kept in one line.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

TIMES = 5  # a ceiling must be this many times the noise


def packing_noise(repacked: Sequence[float]) -> float:
    """Return the standard deviation of two or more equal runs that differ in their order."""
    return statistics.stdev(repacked)


def is_usable(ceiling: float, noise: float) -> bool:
    """Tell whether a world may compare rules.

    Args:
        ceiling: what an oracle gains over equal weights, positive if it is better.
        noise: as `packing_noise` returns it, in the same unit.
    """
    return ceiling > 0 and ceiling >= TIMES * noise


def first_line(ceiling: float, noise: float, unit: str) -> str:
    """Return the first line of a world's table: the ceiling, the noise, and what follows."""
    line = f"Ceiling: an oracle gains {ceiling:+.3f} {unit}; the noise of packing is {noise:.3f}."
    if ceiling <= noise:
        return f"{line} In this world there was nothing to gain."
    if not is_usable(ceiling, noise):
        return f"{line} This is less than {TIMES} times the noise: no rules are compared."
    return line
