"""Compare the speed of grading with that of the published harness's algorithm.

The outputs are solved word problems in the style of a weak model; one in ten has a formula to
compare. Every turn has different outputs, so that no cache helps. Time is processor time, and each
way has its own process.

The harness's algorithm is written after ZubinGou/math-evaluation-harness at db77bc6, without the
pool and the time limit around it. It calls `strip_string` twice, which searches twice for every
unit word with a regular expression, and `math_equal`, which tries `parse_latex`, `parse_expr` and
`latex2sympy` in that order. Ours is what a worker does for a verdict. The details also show
math-verify's second opinion on the whole output, which workers record next to the verdict. It is
not in the claim.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.harness import Claim, Measured, Way, take_turns_apart
from vocagnolm.demo import world
from vocagnolm.evaluation import extraction
from vocagnolm.evaluation.extraction import extract
from vocagnolm.evaluation.grading import symbolic, worker

CLAIMS = (
    Claim("speed", "verdicts take two thirds of the time of the harness's algorithm", at_least=1.5),
    Claim("differ", "and are the same", at_most=0, unit="differ"),
)
Pair = tuple[str, str]


@dataclass(frozen=True)
class Size:
    """Outputs per turn, and turns."""

    outputs: int = 300
    turns: int = 3


FULL, TINY = Size(), Size(outputs=20, turns=1)


def measure(size: Size) -> Measured:
    """Return the speedup of our verdicts, and how many differ."""
    makers = {
        name: partial(Way, run, partial(make_pairs, size.outputs)) for name, run in WAYS.items()
    }
    ways = take_turns_apart(makers, size.turns)
    details = [
        f"{name:34}{way.spread}{size.outputs / way.median_s:8.0f} outputs a second"
        for name, way in ways.items()
    ]
    pairs = make_pairs(size.outputs, size.turns)
    differ = sum(a != b for a, b in zip(ours(pairs), harness(pairs), strict=True))
    seconds = {name: way.median_s for name, way in ways.items()}
    values = {"speed": seconds[HARNESS] / seconds[OURS], "differ": float(differ)}
    return Measured(values, details)


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Write solutions in the style of a weak model, and golds; one in ten needs algebra."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        item = world.problem(rng)
        solution, gold = world.render(item)[1].partition(" ####")[0], str(item.answer)
        answer = gold if rng.random() < 0.3 else str(rng.randint(1, 5000))
        if rng.random() < 0.1:
            gold, answer = make_formula(rng)
        written = f"{solution}\nThe answer is {answer}. $\\boxed{{{answer}}}$"
        # A weak model sometimes repeats the last sentence again and again.
        pairs.append((written + f"\nThe answer is {answer}." * rng.choice((0, 0, 0, 60)), gold))
    return pairs


def make_formula(rng: random.Random) -> Pair:
    """Write a gold formula, and either the same formula in another form or a changed one."""
    a, b, c = (rng.randint(2, 60) for _ in range(3))
    gold, same = rng.choice(
        (
            (rf"\frac{{{a}}}{{{b}}}", rf"\frac{{{a * c}}}{{{b * c}}}"),
            (rf"\frac{{{a}\pi}}{{{b}}}", rf"\pi \cdot \frac{{{a}}}{{{b}}}"),
            (rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}} \cdot {a}"),
            (rf"{a}x + {b}", rf"{b} + {a}x"),
            (rf"x = {a}", rf"{a}\text{{ cm}}"),
            (rf"{a}^\circ", str(a)),
        )
    )
    return gold, same if rng.random() < 0.5 else gold.replace(str(a), str(a + 1))


def ours(pairs: Any) -> list[bool]:
    """Return our verdicts."""
    return [worker._judge("free", extract("free", text), gold)[0] for text, gold in pairs]


def harness(pairs: Any) -> list[bool]:
    """Return the verdicts of the published algorithm."""
    units = mock.patch.object(extraction, "_remove_units", remove_units)
    reading = mock.patch.object(symbolic, "read_answer", read_answer)
    with units, reading:
        return ours(pairs)


def opinions(pairs: Any) -> list[bool | None]:
    """Return math-verify's opinions on the whole outputs."""
    return [worker._opinion("free", text, gold) for text, gold in pairs]


OURS, HARNESS = "ours", "the harness's algorithm"
WAYS: dict[str, Callable[[Any], Any]] = {
    OURS: ours,
    HARNESS: harness,
    "math-verify, the whole output": opinions,
}


def remove_units(string: str) -> str:
    """Delete unit words with a search for each word, twice."""
    for _ in range(2):
        for unit in extraction._UNITS:
            string = re.sub(r"(^|\W)" + unit + r"($|\W)", r"\1\2", string) or string
    return string


def read_answer(text: str) -> Any:
    """Read a text with the first of three parsers that succeeds, or return it unread."""
    from latex2sympy2_extended import latex2sympy
    from sympy.parsing.latex import parse_latex
    from sympy.parsing.sympy_parser import parse_expr

    for read in (parse_latex, parse_expr, latex2sympy):
        for candidate in (text.replace(r"\\", "\\"), text):
            try:
                return read(candidate)
            except Exception:  # noqa: BLE001, PERF203 - any failure, as in the harness
                continue
    return text
