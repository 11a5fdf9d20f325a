"""Compare the time of a training step with TRL's, on the same documents, models and tokens."""

from functools import partial

from benchmarks.harness import Claim
from benchmarks.peers import Size, ratio

CLAIM = Claim("a CPT step takes at most the time of one of TRL's SFT", at_most=1.0, unit="x")
FULL, SMALL, TINY = Size(), Size.small(), Size.tiny()
measure = partial(ratio, name="cpt")
