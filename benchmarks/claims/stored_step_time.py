"""Compare the time of a training step with stored teacher losses with that of a CPT step."""

from functools import partial

from benchmarks.experiments.training_steps import Size, ratio
from benchmarks.harness import Claim

CLAIM = Claim("a step with stored losses takes no longer than a CPT step", at_most=1.0, unit="x")
FULL, TINY = Size(), Size.tiny()
measure = partial(ratio, name="stored_time")
