"""Compare the memory of a training step with TRL's, on the same documents, models and tokens."""

from functools import partial

from benchmarks.harness import Claim
from benchmarks.peers import Size, ratio

CLAIM = Claim("a KLD step takes at most 0.35 of the memory of GOLD's JSD", at_most=0.35, unit="x")
FULL, SMALL, TINY = Size(), Size.small(), Size.tiny()
measure = partial(ratio, name="kld", memory=True)
