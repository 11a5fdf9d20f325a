"""Measure the share of a GPU's peak (MFU) that the student's step reaches.

A step is forward, backward, clipping and AdamW.

MFU is that of `vocagnolm.run.flops`; ways and shapes are those of
`benchmarks.gpu_first`, which also shows where the missing time goes.
"""

from __future__ import annotations

from benchmarks.gpu_first.steps import CPT, Size, mfu
from benchmarks.harness import Claim, Measured

CLAIM = Claim(
    "a step of TinyLlama 1.1B reaches 45 % of a GPU's peak", at_least=0.45, unit="%", needs_gpu=True
)
FULL, TINY = Size(), Size.tiny()


def measure(size: Size) -> Measured:
    """Return the MFU of the median."""
    return Measured(*mfu(size, CPT))
