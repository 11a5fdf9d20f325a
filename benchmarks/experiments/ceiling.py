"""The law of the experiments: rules are compared only where there is something to gain.

An oracle trains on what is right and on nothing else. What it gains over equal weights is a world's
ceiling. The noise is the standard deviation of runs that should be equal: the same rows in other
orders or, where only these exist, other seeds. Where the ceiling is not at least five times the
noise, a difference between two rules says nothing, and a line keeps the world's results.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

TIMES = 5  # a ceiling must be this many times the noise
# The runs of `acceptance`. Its worlds share their students and texts with those of `methods`.
RECORDED = Path(__file__).with_name("acceptance.jsonl")


def packing_noise(equal: Sequence[float]) -> float:
    """Return the standard deviation of two or more runs that should be equal."""
    return statistics.stdev(equal)


def is_usable(ceiling: float, noise: float) -> bool:
    """Tell whether a world may compare rules.

    Args:
        ceiling: what an oracle gains over equal weights, positive if it is better.
        noise: as `packing_noise` returns it, in the same unit.
    """
    return ceiling > 0 and ceiling >= TIMES * noise


def first_line(ceiling: float, noise: float, unit: str) -> str:
    """Return the first line of a world's table: the ceiling, the noise, and what follows."""
    line = f"Ceiling: {ceiling:+.3f} {unit}, with a noise of {noise:.3f}."
    if ceiling <= noise:
        return f"{line} In this world there was nothing to gain."
    if not is_usable(ceiling, noise):
        return f"{line} That is less than {TIMES} times the noise: too little to compare gains."
    return line


def clean_world(world: str) -> str:
    """Return the world that has the same pages without mistakes."""
    if world == "demo":
        return "demo-right"
    return world.replace("noisy", "clean").replace("inserted-40", "clean")


def recorded_gains(world: str, metric: str) -> list[float]:
    """Return what equal weights gain, in a loss, from pages without mistakes, by seed.

    This is an upper bound of what an oracle gains, which can leave out mistakes but not mend them.
    The list is empty for a world without mistakes, and for one that was never recorded.
    """
    losses: dict[tuple[str, int], float] = {}
    for line in RECORDED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["rule"] == "const" and metric in row:
            losses[row["world"], row["seed"]] = row[metric]
    gains = []
    for (name, seed), loss in losses.items():
        clean = losses.get((clean_world(world), seed))
        if name == world != clean_world(world) and clean is not None:
            gains.append(loss - clean)
    return gains


def recorded_line(world: str) -> str:
    """Return `first_line` of a world of `acceptance` or `methods`, or nothing."""
    for metric in ("nats_per_character", "clean_loss"):
        gains = recorded_gains(world, metric)
        if len(gains) > 1:
            unit = metric.replace("_", " ")
            return first_line(statistics.mean(gains), packing_noise(gains), unit)
    return ""
