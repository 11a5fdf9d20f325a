"""Compare a step with a co-resident teacher with the teacher's forward pass and a CPT step."""

from functools import partial

from benchmarks.experiments.training_steps import Size, ratio
from benchmarks.harness import Claim

CLAIM = Claim(
    "a step with a teacher takes at most 1.05 times its forward pass and a CPT step",
    at_most=1.05,
    unit="x",
)
FULL, TINY = Size(), Size.tiny()
measure = partial(ratio, name="online_time")
