"""Compare the time of few-shot completions with left-padded batches, and with other peers."""

from benchmarks.completions import FULL, OURS, SMALL, THEIRS, TINY, Size, broken, details, turns
from benchmarks.harness import Claim, Measured

__all__ = ["CLAIM", "FULL", "SMALL", "TINY", "measure"]

CLAIM = Claim(
    "evaluation takes at most a third of the time of left-padded batches", at_most=1 / 3, unit="x"
)


def measure(size: Size) -> Measured:
    """Return the time of the engine, as a share of that of left-padded batches."""
    found = turns(size)
    share = found[OURS].seconds / found[THEIRS].seconds
    return Measured(share, details(size), broken(size))
