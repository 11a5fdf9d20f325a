"""Compare the growth of a training step with its tokens: exponents of time and memory.

Steps of 256, 512 and 1,024 tokens in documents of about 100, every way and size in turns. The value
is the largest exponent of ours, of a line through the logarithms; below 1 is what a step costs
whatever its size. TRL's are shown beside them.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks import peers
from benchmarks.harness import Claim, Measured, Way, take_turns_apart

CLAIM = Claim("time and memory of a step grow with its tokens to the power 1.05", at_most=1.05)


@dataclass(frozen=True)
class Size:
    """The tokens of steps, and everything else of `benchmarks.peers`."""

    tokens: str = "256 512 1024"
    turns: int = 3
    peers: peers.Size = field(default_factory=lambda: peers.Size.trained(lengths="100"))


FULL, SMALL = Size(), Size("128 512")
TINY = Size("32 64", 1, replace(peers.Size.tiny(), lengths="20"))


def measure(size: Size) -> Measured:
    """Return the largest exponent of ours."""
    tokens = [int(number) for number in size.tokens.split()]
    with tempfile.TemporaryDirectory() as name:
        makers = {}
        for number in tokens:
            one = replace(size.peers, max_length=number, turns=size.turns)
            (own := Path(name) / str(number)).mkdir()
            for way, make in peers.make_makers(one, own).items():
                makers[f"{way} {number}"] = make
        taken = take_turns_apart(makers, size.turns, memory=1)
    found, details = 0.0, []
    for way in peers.WAYS:
        ways = [taken[f"{way} {number}"] for number in tokens]
        time, memory = exponents(tokens, ways)
        if way in peers.OURS:
            found = max(found, time, memory)
        seconds = ", ".join(f"{one.median_s:.3f}" for one in ways)
        details.append(f"{way:10} {seconds} s: time {time:.2f}, memory {memory:.2f}")
    return Measured(found, tuple(details))


def exponents(tokens: list[int], ways: list[Way]) -> tuple[float, float]:
    """Of time and of memory."""
    time, memory = (
        np.polyfit(np.log(tokens), np.log(values), 1)[0]
        for values in (
            [way.median_s for way in ways],
            [max(statistics.median(way.added_bytes), 1) for way in ways],
        )
    )
    return float(time), float(memory)
