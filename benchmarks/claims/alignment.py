"""Compare alignment with dynamic programming, and check it against every pair of tokens.

Three tokenizers split one text. Every ordered pair of them is a student and a teacher. Both
aligners get the tokens with their characters, and tokenization is not timed. A student token is
right if it is mapped to exactly the teacher tokens that share a character with it.

The dynamic programming is that of Needleman and Wunsch (1970) on the texts of tokens. Equal tokens
score 1, unequal ones -1 and gaps -1, as in NeMo-RL's aligner between anchors (`token_aligner.py`).
This version computes whole diagonals in NumPy. The published one is a loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.generated import read_texts, tokenizer
from benchmarks.harness import Claim, Measured, one_thread
from vocagnolm import align_spans, encode

CLAIMS = (
    Claim("speed", "alignment is 1,000 times as fast as dynamic programming", at_least=1000),
    Claim("wrong", "alignment maps every token right", at_most=0, unit="wrong"),
)
Integers = npt.NDArray[np.integer[Any]]
_ACROSS, _UP, _LEFT = np.int8(0), np.int8(1), np.int8(2)
_OUTSIDE = 2**30


@dataclass(frozen=True)
class Size:
    """Tokenizers (directories or `generated.KINDS`), and the text (by default generated)."""

    tokenizers: str = "llama gpt2 qwen"
    corpus: str = ""
    characters: int = 28_000
    turns: int = 11


FULL, TINY = Size(), Size("tiny-llama tiny-qwen", characters=1500, turns=1)


def measure(size: Size) -> Measured:
    """Return the smallest speedup over dynamic programming, and the number of wrong tokens."""
    one_thread()
    text = "\n\n".join(read_texts(size.corpus, 100))[: size.characters]
    spans = {name: encode(tokenizer(name), text).spans for name in size.tokenizers.split()}
    factors, details, wrong = [], [], 0
    for student, teacher in permutations(spans, 2):
        a, b = spans[student], spans[teacher]
        truth = [
            np.flatnonzero((b[:, 0] < end) & (start < b[:, 1])).tolist()
            for start, end in a.tolist()
        ]
        mapped, seconds = timed(lambda a=a, b=b: align_spans(a, b), size.turns)
        found = [list(range(*pair)) if pair[0] >= 0 else [] for pair in mapped.tolist()]
        wrong += count_wrong(found, truth)
        words = [[text[start:end] for start, end in side.tolist()] for side in (a, b)]
        aligned, slow_s = timed(lambda words=words: dynamic_programming(*words), 1)
        factors.append(slow_s / seconds)
        theirs = count_wrong([[] if x is None else [x] for x in aligned], truth) / len(a)
        details.append(
            f"{student} <- {teacher}, {len(a):,} <- {len(b):,} tokens: {1e3 * seconds:.2f} ms, "
            f"dynamic programming {slow_s:.2f} s, {theirs:.1%} of its tokens wrong"
        )
    return Measured({"speed": min(factors), "wrong": wrong}, details)


def timed(run: Callable[[], Any], turns: int) -> tuple[Any, float]:
    """Return the last result, and the median processor time in seconds."""
    seconds = []
    for _ in range(turns):
        start = time.process_time()
        found = run()
        seconds.append(time.process_time() - start)
    return found, statistics.median(seconds)


def count_wrong(found: Sequence[list[int]], truth: Sequence[list[int]]) -> int:
    """Count the student tokens that are not mapped to the right teacher tokens."""
    return sum(one != other for one, other in zip(found, truth, strict=True))


def dynamic_programming(student: Sequence[str], teacher: Sequence[str]) -> list[int | None]:
    """Map each student token to its teacher token in the cheapest alignment, or to None."""
    numbers = {text: index for index, text in enumerate(sorted({*student, *teacher}))}
    a, b = (np.array([numbers[text] for text in side], np.int32) for side in (student, teacher))
    mapped: list[int | None] = [None] * len(a)
    moves = diagonals(a, b)
    i, j = len(a), len(b)
    while i and j:
        move = int(moves[i + j - 2][i - max(1, i + j - len(b))])
        if move == _ACROSS:
            mapped[i - 1] = int(j) - 1
        i, j = i - (move != _LEFT), j - (move != _UP)
    return mapped


def diagonals(a: Integers, b: Integers) -> list[npt.NDArray[np.int8]]:
    """Find the cheapest move into each cell of the table, diagonal by diagonal."""
    # Entry i is cell (i, d - i) of diagonal d. Row and column 0 come before the first tokens:
    #
    #       0 1 2 3
    #     0 . 1 2 3         a cell of diagonal 3 needs 2 (left and above) and 1 (across)
    #     1 1 2 3
    rows, columns = len(a), len(b)
    before, last, new = (np.full(rows + 1, _OUTSIDE, np.int32) for _ in range(3))
    before[0], moves = 0, []
    last[:2] = 1
    for d in range(2, rows + columns + 1):
        low, high = max(1, d - columns), min(rows, d - 1)
        is_equal = a[low - 1 : high] == b[d - high - 1 : d - low][::-1]
        across = before[low - 1 : high] + np.where(is_equal, np.int32(-1), 1)
        up, left = last[low - 1 : high] + 1, last[low : high + 1] + 1
        beside = np.minimum(up, left)
        moves.append(np.where(across <= beside, _ACROSS, np.where(up <= left, _UP, _LEFT)))
        new[0] = new[min(d, rows)] = d
        np.minimum(across, beside, out=new[low : high + 1])
        before, last, new = last, new, before
    return moves
