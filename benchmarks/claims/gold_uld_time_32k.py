"""Compare the time of a training step with TRL's, with vocabularies of 32,000 words."""

from functools import partial

from benchmarks.harness import Claim
from benchmarks.peers import Size, ratio

CLAIM = Claim("with 32,000 words a ULD step takes at most half the time", at_most=0.5, unit="x")
FULL = Size.trained()
SMALL = Size.trained(lengths=Size.small().lengths, turns=1)
TINY = Size.tiny()
measure = partial(ratio, name="uld")
