"""Compare a step with a co-resident teacher with the teacher's forward pass and a CPT step."""

from functools import partial

from benchmarks.experiments.training_steps import Size, ratio
from benchmarks.harness import Claim

CLAIM = Claim(
    "a step with a teacher takes no longer than its forward pass and a CPT step",
    at_most=1.0,
    unit="x",
)
FULL, TINY = Size(), Size.tiny()
measure = partial(ratio, name="online_time")
