"""Compare the growth of a corpus's preparation with its tokens: exponents of time and memory.

PlanetMath with the tokenizers of TinyLlama and Qwen2.5, again and again, each time with another
number before the texts; each size in a process of its own, from a corpus on the disk to a prepared
one. Processor time of one thread, and the most that is added to the memory, with the files that are
mapped into it. The value is the larger exponent, of a line through the logarithms.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import datasets

from benchmarks.claims import preparation_time
from benchmarks.claims.preparation_time import load, write
from benchmarks.claims.step_growth import exponents
from benchmarks.harness import Claim, Measured, Way, alone, take_turns
from vocagnolm.data import align_corpus

CLAIM = Claim("time and memory of preparing a corpus grow to the power 1.05", at_most=1.05)


@dataclass(frozen=True)
class Size:
    """Documents of each corpus, and everything else of `preparation_time`; 1,225 are 1M tokens."""

    documents: str = "1225 6125 24500"
    texts: preparation_time.Size = field(default_factory=preparation_time.Size)


FULL, SMALL = Size(), Size("300 600 1200")
TINY = Size("20 40", preparation_time.TINY)


def measure(size: Size) -> Measured:
    """Return the larger exponent."""
    datasets.disable_progress_bars()
    counts = [int(number) for number in size.documents.split()]
    texts, _ = load(size.texts)
    numbered = [f"{number}\n{text}" for number, text in zip(range(max(counts)), cycle(texts))]
    tokens, ways, details = [], [], []
    for documents in counts:
        with tempfile.TemporaryDirectory() as name:
            write(numbered[:documents], Path(name))
            found, stored, *taken = alone(prepare, size.texts, name)
        tokens.append([found])
        ways.append(way := Way(print, seconds=taken[:1], added_bytes=taken[1:]))
        details.append(
            f"{found:12,} student tokens{way.median_s:8.2f} s,{found / way.median_s:9,.0f} a "
            f"second,{way.added}, {stored / found:.2f} bytes each"
        )
    powers = exponents(tokens, ways)
    details.append("exponents: time {:.2f}, memory {:.2f}".format(*powers))
    return Measured(max(powers), tuple(details))


def prepare(size: preparation_time.Size, directory: str) -> tuple[int, int, float, int]:
    """Prepare one corpus, in a process of its own: its student tokens, bytes, time and memory."""
    datasets.disable_progress_bars()
    texts, readers = load(size)
    align_corpus(datasets.Dataset.from_dict({"text": texts[:10]}), *readers)  # warm up
    corpus = datasets.load_from_disk(directory)
    found = []
    way = Way(lambda _: found.append(align_corpus(corpus, *readers)))
    take_turns({"preparation": way}, 1, warm_up=0, memory=True)
    (segments,) = found
    stored = segments.rows.data.nbytes
    return segments.total("student_tokens"), stored, way.median_s, *way.added_bytes
