"""Compare the memory of a training step with TRL's, on the same documents, models and tokens."""

from functools import partial

from benchmarks.harness import Claim
from benchmarks.peers import Size, ratio

CLAIM = Claim(
    "with a 152,000-word teacher a ULD step takes at most 0.15 of GOLD's memory",
    at_most=0.15,
    unit="x",
)
FULL, SMALL, TINY = Size(), Size.small(), Size.tiny()
measure = partial(ratio, name="uld", memory=True)
