"""Measure the share of a GPU's peak (MFU) that the teacher's forward pass reaches.

MFU is that of `vocagnolm.run.flops`; ways and shapes are those of
`benchmarks.gpu_first`, which also shows where the missing time goes.
"""

from __future__ import annotations

from benchmarks.gpu_first.steps import TEACHER, Size, mfu
from benchmarks.harness import Claim, Measured

CLAIM = Claim(
    "a forward pass of Qwen2.5-Math-7B reaches 60 % of a GPU's peak",
    at_least=0.6,
    unit="%",
    needs_gpu=True,
)
FULL, TINY = Size(), Size.tiny()


def measure(size: Size) -> Measured:
    """Return the MFU of the median."""
    return Measured(*mfu(size, TEACHER))
