"""Compare the growth of a training step with its tokens: exponents of time and memory.

Steps of 2, 4 and 8 documents of about 96 tokens, every way and size in turns. The value is the
largest exponent of ours, of a line through the logarithms; below 1 is what a step costs whatever
its size. TRL's are shown beside them. A document has 108 places of a block, so that blocks of every
size are alike full: what grows with places, and what with tokens, grows alike.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks import peers
from benchmarks.harness import Claim, Measured, Way, take_turns_apart

CLAIM = Claim("time and memory of a step grow with its tokens to the power 1.05", at_most=1.05)


@dataclass(frozen=True)
class Size:
    """The places of steps, and everything else of `benchmarks.peers`."""

    places: str = "216 432 864"
    turns: int = 3
    peers: peers.Size = field(default_factory=lambda: peers.Size.trained(lengths="100"))


FULL, SMALL = Size(), Size("108 540", 2)
TINY = Size("32 64", 1, replace(peers.Size.tiny(), lengths="20"))


def measure(size: Size) -> Measured:
    """Return the largest exponent of ours."""
    makers, counts = {}, {}
    with tempfile.TemporaryDirectory() as name:
        for number in size.places.split():
            one = replace(size.peers, max_length=int(number), turns=size.turns)
            (own := Path(name) / number).mkdir()
            for way, make in peers.make_makers(one, own).items():
                makers[f"{way} {number}"] = make
            counts[number] = count_tokens(own)
        taken = take_turns_apart(makers, size.turns, memory=1)
    found, details = 0.0, [f"student tokens of a step: {counts}"]
    for way in peers.WAYS:
        ways = [taken[f"{way} {number}"] for number in counts]
        time, memory = exponents([*counts.values()], ways)
        if way in peers.OURS:
            found = max(found, time, memory)
        seconds = ", ".join(f"{one.median_s:.3f}" for one in ways)
        details.append(f"{way:10} {seconds} s: time {time:.2f}, memory {memory:.2f}")
    return Measured(found, tuple(details))


def count_tokens(directory: Path) -> list[int]:
    """Count the student tokens of every turn's documents; a block has places beyond them."""
    tokenizer = AutoTokenizer.from_pretrained(directory / "student")
    turns = json.loads((directory / "turns.json").read_text())
    return [sum(map(len, tokenizer(texts)["input_ids"])) for texts in turns[1:]]


def exponents(tokens: list[list[int]], ways: list[Way]) -> tuple[float, float]:
    """Of time and of memory, from the tokens of each turn of every way."""
    sizes = [statistics.mean(counts) for counts in tokens]
    time, memory = (
        # Turns of one size are not equally long, so that their median is that of a token.
        1 + np.polyfit(np.log(sizes), np.log(list(map(_of_a_token, taken, tokens))), 1)[0]
        for taken in ([way.seconds for way in ways], [way.added_bytes for way in ways])
    )
    return float(time), float(memory)


def _of_a_token(taken: Sequence[float], counts: list[int]) -> float:
    # Where nothing is added, a small number in place of no logarithm.
    pairs = zip(taken, counts[: len(taken)], strict=True)  # turns of memory are fewer
    return statistics.median(each / n or 1e-9 for each, n in pairs)
