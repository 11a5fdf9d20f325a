"""How several outputs per item are drawn. Greedy decoding, the paper's, draws nothing.

Every output has its own seed, from benchmark, item and number. It does not depend on what else is
asked, so an evaluation that is resumed, split or batched differently draws the same numbers.
"""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """How the outputs of an item are drawn."""

    samples: int
    # Logits are divided by it. It is above 0.
    temperature: float
    # Tokens are drawn from the most probable ones that together have this probability.
    top_p: float = 1.0

    def mark(self) -> str:
        """Say why an accuracy cannot be compared with the paper's."""
        outputs = "1 output" if self.samples == 1 else f"{self.samples} outputs"
        how = f"temperature {self.temperature:g}, top_p {self.top_p:g}"
        return f"sampled: {outputs} per item ({how}), not the paper's greedy decoding"


def seed_of(benchmark: str, idx: int, sample: int) -> int:
    """Return the seed of an output, a number of 32 bits.

    It is the same for every model and temperature.
    """
    return _hashed(f"{benchmark} {idx} {sample}", 32)


def uniform(seed: int, place: int) -> float:
    """Return the number in [0, 1) that decides an output's token at a position."""
    return _hashed(f"{seed} {place}", 48) / 2.0**48


def _hashed(text: str, bits: int) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[: bits // 8], "big")
