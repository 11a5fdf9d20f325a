"""Compare steps with stored losses, and steps with a teacher in memory, to CPT steps on a CPU.

Unlike CPT, a guided step computes no gradient of the losses that it does not select. That saves
time, because the head dominates such small models. `--set top_k=1` shows what guidance costs
without that saving. Memory is what a way holds (weights, optimizer) plus the most that a step adds.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

from benchmarks.harness import Claim, Measured, take_turns_apart
from benchmarks.steps import CPT, STORED, Size, Steps

CLAIMS = (
    Claim("stored time", "a step with stored losses takes no longer than a CPT step", at_most=1.0),
    Claim("stored memory", "and 1.05 times its memory", at_most=1.05),
    Claim(
        "online time",
        "a step with a teacher takes no longer than its forward pass and a CPT step",
        at_most=1.0,
    ),
)
FULL = Size("cpu", "claim", max_length=512, batch_size=2, accumulation=1, repetitions=15)
TINY = replace(FULL, scale="tiny", max_length=64, repetitions=2)


def measure(size: Size) -> Measured:
    """Return the ratios of median times, and of memory."""
    with tempfile.TemporaryDirectory() as directory:
        steps = Steps(size, directory)
        makers = {name: lambda way=way: way for name, way in steps.ways.items()}
        steps.ways = take_turns_apart(makers, size.repetitions, memory=3)
    ratios = steps.ratios()
    memory = {name: steps.measures(name)["memory_gib"] for name in (CPT, STORED)}
    values = {
        "stored time": ratios["stored / CPT"],
        "stored memory": memory[STORED] / memory[CPT],
        "online time": ratios["online / (teacher forward + CPT)"],
    }
    return Measured(values, steps.table())
