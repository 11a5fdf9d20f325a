"""Compare alignment with dynamic programming, edit distances and GOLD's walk over bytes.

Real maths, tokenized by every pair of the tokenizers that are given. All aligners get the same
tokens with their characters, and none pays for tokenizing. A student token is right if it is mapped
to exactly the teacher tokens that share a character with it, found by comparing every pair.

- Dynamic programming: Needleman and Wunsch (1970) over the texts of tokens, equal 1, unequal -1,
  left out -1, which NeMo-RL's aligner (`token_aligner.py`) does between anchors. Whole diagonals at
  once in NumPy; what is published is a loop.
- Edit distance: MinED (Wan et al., arXiv 2401.10491, Section 3.2; the baseline of DSKD), dynamic
  time warping with the Levenshtein distance of two tokens as cost. Distances of all pairs of
  different tokens at once, then whole diagonals; what is published is a loop.
- GOLD's walk: the kernel of TRL, on our spans counted in bytes. It gives groups of tokens that end
  at the same byte, which are larger than what a token overlaps, and are right where they do not
  have to be. Left out where TRL is not installed.
"""

from __future__ import annotations

import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer

from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.harness import Claim, Measured, Skipped, one_thread, quartiles
from benchmarks.peers import SHARED
from vocagnolm.alignment import align_spans
from vocagnolm.spans import encode
from vocagnolm.texts.tokens import Spans

CLAIM = Claim("alignment is 1,000 times faster than dynamic programming", at_least=1000, unit="x")
Ranges = list[Sequence[int]]  # of every student token, the teacher tokens that it is mapped to
Integers = npt.NDArray[np.integer[Any]]
ACROSS, UP, LEFT = np.int8(0), np.int8(1), np.int8(2)
OUTSIDE = 2**30


@dataclass(frozen=True)
class Size:
    """Text and tokenizers.

    Attributes:
        tokenizers: a directory of directories; "" trains two.
        student: that of the pairs for which the slow aligners are run; their teachers are all.
        corpus: a JSON lines file with a `text`; "" generates texts.
        characters: of the text.
        turns: of the fast aligners; the median counts.
    """

    tokenizers: str = str(SHARED / "tokenizers")
    student: str = "tinyllama"
    corpus: str = str(SHARED / "data/corpora/math_train.jsonl")
    characters: int = 20_000
    turns: int = 11


FULL, TINY = Size(), Size("", "", "", characters=1500, turns=1)


class Tokens(NamedTuple):
    """The tokens of a text: their characters, their bytes and their texts."""

    spans: Spans
    bytes: list[tuple[int, int]]
    texts: list[str]


def measure(size: Size) -> Measured:
    """Return the least factor by which dynamic programming is slower.

    Raises:
        Skipped: the text or the tokenizers are not there.
    """
    if missing := [p for p in (size.tokenizers, size.corpus) if p and not Path(p).exists()]:
        raise Skipped(f"it needs {missing[0]}: --set tokenizers=DIR corpus=FILE.jsonl")
    one_thread()
    text = read_text(size)
    tokens = {name: read_tokens(one, text) for name, one in load(size).items()}
    gold = gold_walk()
    factors, details, wrong = [], [], 0
    every: dict[str, list[float]] = {"ours": [], "GOLD's walk": []}
    for student, teacher in permutations(tokens, 2):
        a, b = tokens[student], tokens[teacher]
        truth = overlapping(a.spans, b.spans)
        ours, seconds = timed(lambda a=a, b=b: align_spans(a.spans, b.spans), size.turns)
        found: Ranges = [range(*pair) if pair[0] >= 0 else () for pair in ours.tolist()]
        every["ours"].append(seconds)
        wrong += sum(not same(x, y) for x, y in zip(found, truth, strict=True))
        lines = [f"ours {seconds * 1e3:.2f} ms, {summary(found, truth)}"]
        if gold:
            groups, took = timed(lambda a=a, b=b: gold(a.bytes, b.bytes), size.turns)
            every["GOLD's walk"].append(took)
            lines.append(f"GOLD's walk {took * 1e3:.2f} ms, {summary(flat(groups), truth)}")
        if size.student not in ("", student):
            continue
        for name, align in SLOW.items():
            mapped, took = timed(lambda a=a, b=b, align=align: align(a.texts, b.texts), 1)
            lines.append(f"{name} {took:.2f} s, {summary(mapped, truth)}")
            if align is dynamic_programming:
                factors.append(took / seconds)
        details.append(f"{student} <- {teacher}, {len(a.texts):,} <- {len(b.texts):,} tokens")
        details += [f"    {line}" for line in lines]
    details += [
        f"all {len(times)} pairs, {name}: {quartiles([1e3 * x for x in times], ' ms').strip()}"
        for name, times in every.items()
        if times
    ]
    broken = f"({wrong} student tokens are mapped otherwise than by brute force)" if wrong else ""
    return Measured(min(factors), tuple(details), broken)


def timed(run: Callable[[], Any], turns: int) -> tuple[Any, float]:
    """Return the last result, and the median of the processor seconds."""
    seconds = []
    for _ in range(turns):
        start = time.process_time()
        found = run()
        seconds.append(time.process_time() - start)
    return found, statistics.median(seconds)


def read_text(size: Size) -> str:
    """The text, cut at its length."""
    if not size.corpus:
        return "\n".join(generate_texts(10))[: size.characters]
    lines = Path(size.corpus).read_text(encoding="utf-8").splitlines()[:200]
    return "\n\n".join(json.loads(line)["text"] for line in lines)[: size.characters]


def load(size: Size) -> dict[str, Any]:
    """The tokenizers by name."""
    if not size.tokenizers:
        texts = generate_texts(10)
        return {"metaspace": train_student(texts), "byte-level": train_teacher(texts)}
    paths = sorted(path.parent for path in Path(size.tokenizers).glob("*/tokenizer.json"))
    return {path.name: AutoTokenizer.from_pretrained(path) for path in paths}


def read_tokens(tokenizer: Any, text: str) -> Tokens:
    """Tokenize the text, with our spans."""
    spans = encode(tokenizer, text).spans
    at = np.cumsum([0, *(len(character.encode()) for character in text)])
    texts = [text[start:end] for start, end in spans.tolist()]
    return Tokens(spans, list(map(tuple, at[spans].tolist())), texts)


def overlapping(student: Spans, teacher: Spans) -> Ranges:
    """Compare every pair of tokens: those that share a character."""
    return [
        np.flatnonzero((teacher[:, 0] < end) & (start < teacher[:, 1])).tolist()
        for start, end in student.tolist()
    ]


def same(mapped: Sequence[int], truth: Sequence[int]) -> bool:
    """Tell if two student tokens are mapped alike."""
    return list(mapped) == list(truth)


def summary(mapped: Ranges, truth: Ranges) -> str:
    """Say how many are mapped, and how many of all are right."""
    shares = (
        sum(map(bool, mapped)) / len(truth),
        sum(same(*pair) for pair in zip(mapped, truth, strict=True)) / len(truth),
    )
    return "{:.1%} mapped, {:.1%} right".format(*shares)


def gold_walk() -> Callable[..., Any] | None:
    """The kernel of TRL's GOLD, if it is installed."""
    try:
        trainer = importlib.import_module("trl.experimental.gold.gold_trainer")
    except ImportError:
        return None
    walk: Callable[..., Any] = trainer.ULDLoss._align_by_byte_offsets
    return walk


def flat(groups: tuple[list[list[int]], list[list[int]]]) -> Ranges:
    """The teacher tokens of the group that each student token is in."""
    return [theirs for ours, theirs in zip(*groups, strict=True) for _ in ours]


def dynamic_programming(student: list[str], teacher: list[str]) -> Ranges:
    """Needleman and Wunsch over tokens: a student token is mapped to the one it stands over."""
    numbers = {text: index for index, text in enumerate({*student, *teacher})}
    a, b = (np.array([numbers[text] for text in side], np.int32) for side in (student, teacher))
    mapped: Ranges = [()] * len(a)
    for i, j, move in cheapest_path(a, b, lambda x, y: np.where(x == y, np.int32(-1), 1), gap=1):
        if move == ACROSS:
            mapped[i] = [j]
    return mapped


def edit_distance(student: list[str], teacher: list[str]) -> Ranges:
    """Warp one side to the other: a student token is mapped to all that it meets on the path."""
    (words_a, a), (words_b, b) = (
        np.unique(side, return_inverse=True) for side in (student, teacher)
    )
    table = levenshtein(words_a.tolist(), words_b.tolist())
    mapped: list[list[int]] = [[] for _ in a]
    for i, j, _ in cheapest_path(a, b, lambda x, y: table[x, y], gap=None):
        mapped[i].insert(0, j)
    return mapped


def cheapest_path(
    a: Integers, b: Integers, cost_of: Callable[..., Integers], gap: int | None
) -> Iterator[tuple[int, int, int]]:
    """The cells (i, j) of the path of least cost, from its end, and how each was entered.

    A step along one side costs `gap`, or, without one, what the cell costs that it leads to.
    """
    # Entry i is cell (i, d - i) of diagonal d; row and column 0 stand before the first token:
    #
    #       0 1 2 3
    #     0 . 1 2 3         a cell of diagonal 3 needs 2 (left and above) and 1 (across)
    #     1 1 2 3
    rows, columns = len(a), len(b)
    before, last, new = (np.full(rows + 1, OUTSIDE, np.int32) for _ in range(3))
    before[0], moves = 0, []
    last[:2] = OUTSIDE if gap is None else gap
    for d in range(2, rows + columns + 1):
        low, high = max(1, d - columns), min(rows, d - 1)
        cost = cost_of(a[low - 1 : high], b[d - high - 1 : d - low][::-1])
        aside = cost if gap is None else gap
        up, left = last[low - 1 : high] + aside, last[low : high + 1] + aside
        across = before[low - 1 : high] + cost
        beside = np.minimum(up, left)
        moves.append(np.where(across <= beside, ACROSS, np.where(up <= left, UP, LEFT)))
        new[0] = new[min(d, rows)] = OUTSIDE if gap is None else d * gap
        np.minimum(across, beside, out=new[low : high + 1])
        before, last, new = last, new, before
    i, j = rows, columns
    while i and j:
        move = int(moves[i + j - 2][i - max(1, i + j - columns)])
        yield i - 1, j - 1, move
        i, j = i - (move != LEFT), j - (move != UP)


def levenshtein(a: list[str], b: list[str]) -> Integers:
    """The edit distances [A, B] of all pairs of texts that are not empty."""
    # Longest first, so that those with a character of some number are the first ones.
    orders = [sorted(range(len(side)), key=lambda n, side=side: -len(side[n])) for side in (a, b)]
    a, b = ([side[n] for n in order] for side, order in zip((a, b), orders, strict=True))
    table = np.empty((len(a), len(b)), np.int32)
    last = [np.full((len(a), len(b)), q, np.int32) for q in range(len(b[0]) + 1)]
    for p in range(1, len(a[0]) + 1):
        longer = [text for text in a if len(text) >= p]
        ours, ends = np.array([ord(text[p - 1]) for text in longer]), len(longer)
        new = [np.full((ends, len(b)), p, np.int32)]
        for q in range(1, len(b[0]) + 1):
            theirs = np.array([ord(text[q - 1]) for text in b if len(text) >= q])
            width = len(theirs)
            changed = last[q - 1][:ends, :width] + (ours[:, None] != theirs)
            beside = np.minimum(last[q][:ends, :width], new[q - 1][:, :width]) + 1
            new.append(np.minimum(changed, beside))
            # Pairs that end here.
            x, y = (sum(len(text) > n for text in side) for side, n in ((a, p), (b, q)))
            table[x:ends, y:width] = new[q][x:, y:]
        last = new
    found = np.empty_like(table)
    found[np.ix_(*orders)] = table
    return found


SLOW = {"dynamic programming": dynamic_programming, "edit distance": edit_distance}
