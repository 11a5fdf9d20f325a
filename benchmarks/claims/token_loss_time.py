"""Compare the time of the teacher's token losses with that of full logits and `F.cross_entropy`.

The model and the ways of `token_loss_memory`, in turns; the median of the turns' ratios.
"""

from __future__ import annotations

import statistics

from benchmarks.claims.token_loss_memory import FULL, TINY, Size, score
from benchmarks.harness import Claim, Measured, alone

CLAIM = Claim(
    "a teacher's token losses take at most 0.6 of the time of its full logits",
    at_most=0.6,
    unit="x",
)
_TURNS = 3

__all__ = ["CLAIM", "FULL", "TINY", "measure"]


def measure(size: Size) -> Measured:
    """Return the wall time of the token losses over that of full logits."""
    turns = [
        [alone(score, way, size)[1] for way in ("token losses", "full logits")]
        for _ in range(_TURNS)
    ]
    details = [f"{ours:6.2f} s beside {theirs:6.2f} s" for ours, theirs in turns]
    return Measured(statistics.median(ours / theirs for ours, theirs in turns), tuple(details))
