"""Compare the memory of a training step with TRL's, with vocabularies of 32,000 words."""

from functools import partial

from benchmarks.claims import gold_uld_time_32k
from benchmarks.harness import Claim
from benchmarks.peers import ratio

CLAIM = Claim("with 32,000 words a ULD step takes at most 0.3 of the memory", at_most=0.3, unit="x")
FULL, SMALL, TINY = gold_uld_time_32k.FULL, gold_uld_time_32k.SMALL, gold_uld_time_32k.TINY
measure = partial(ratio, name="uld", memory=True)
