"""Compare the tokens read before the first new ones with left-padded batches, and with peers."""

from benchmarks.completions import FULL, OURS, SMALL, THEIRS, TINY, Size, broken, details, turns
from benchmarks.harness import Claim, Measured

__all__ = ["CLAIM", "FULL", "SMALL", "TINY", "measure"]

CLAIM = Claim(
    "evaluation reads at most a tenth of the tokens of left-padded batches", at_most=0.1, unit="x"
)


def measure(size: Size) -> Measured:
    """Return the tokens that the engine reads, as a share of those of left-padded batches."""
    found = turns(size)
    return Measured(found[OURS].tokens / found[THEIRS].tokens, details(size), broken(size))
