"""Measure the share of a GPU's peak (MFU) that a student's step and a teacher's pass reach.

A step is forward, backward, clipping and AdamW of TinyLlama 1.1B; the teacher is Qwen2.5-Math-7B.
`benchmarks.gpu_first` also shows where the rest of the time goes.
"""

from __future__ import annotations

import tempfile

from benchmarks.harness import Claim, Measured, Skipped, take_turns
from benchmarks.models import has_cuda
from benchmarks.steps import CPT, TEACHER, Size, Steps

CLAIMS = (
    Claim("student", "a step of TinyLlama 1.1B reaches 45 % of the peak", at_least=0.45, unit="%"),
    Claim("teacher", "a pass of Qwen2.5-Math-7B reaches 60 %", at_least=0.6, unit="%"),
)
FULL, TINY = Size(), Size.tiny()


def measure(size: Size) -> Measured:
    """Return the MFU at the median times.

    Raises:
        Skipped: there is no GPU, or its peak is unknown.
    """
    if not has_cuda():
        raise Skipped("it needs a GPU, and there is none")
    if size.peak is None:
        raise Skipped("no known peak: give it with --set peak_tflops=TFLOPS")
    with tempfile.TemporaryDirectory() as directory:
        steps = Steps(size, directory)
        take_turns(steps.ways, size.repetitions, size.device, memory=True)
    mfu = {
        role: steps.measures(way)["mfu"] for role, way in (("student", CPT), ("teacher", TEACHER))
    }
    return Measured(mfu, steps.table())
