"""Compare the speed of grading with that of the harness's algorithm and of math-verify.

Worked solutions of GSM8K and MATH as a weak model spoils them, one in ten with a formula to compare
(`benchmarks.experiments.grading`), others in every turn, so that no cache knows them; processor
time, each way in a process of its own.

The harness's algorithm is written from ZubinGou/math-evaluation-harness at db77bc6 (`strip_string`
twice, with every unit word as a regular expression twice over; `math_equal`, which reads by
`parse_latex`, `parse_expr`, `latex2sympy`, in that order), without the pool and the time limit
around it. Ours is what a worker does for a verdict, without and with the second opinion that
math-verify gives on the whole output, and the sending of neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.experiments.grading import realistic_pairs
from benchmarks.harness import Claim, Measured, Skipped, Way, take_turns_apart
from benchmarks.peers import SHARED

CLAIM = Claim("verdicts come twice as fast as by the harness's algorithm", at_least=2.0, unit="x")


@dataclass(frozen=True)
class Size:
    """Outputs of a turn, and where the benchmarks are, in the harness's layout."""

    data: str = str(SHARED / "data/benchmarks")
    outputs: int = 300
    turns: int = 5


FULL, SMALL, TINY = Size(), Size(turns=3), Size(outputs=20, turns=1)


def measure(size: Size) -> Measured:
    """Return how many times as many outputs a second have a verdict.

    Raises:
        Skipped: the benchmarks are not there.
    """
    if not Path(size.data).exists():
        raise Skipped(f"it needs {size.data}: --set data=DIR")
    ways = take_turns_apart({name: partial(make_way, name, size) for name in WAYS}, size.turns)
    ours, harness, *_ = (way.median_s for way in ways.values())
    details = [
        f"{name:34}{way.spread}{size.outputs / way.median_s:8.0f} outputs a second"
        for name, way in ways.items()
    ]
    pairs = realistic_pairs(Path(size.data), size.outputs, size.turns)
    differ = sum(
        a != b for a, b in zip(*(WAYS[name](pairs) for name in list(WAYS)[:2]), strict=True)
    )
    details.append(f"verdicts of {size.outputs - differ} of {size.outputs} outputs are the same")
    return Measured(harness / ours, tuple(details), f"({differ} verdicts differ)" if differ else "")


def make_way(name: str, size: Size) -> Way:
    """Make a way, in its process."""
    return Way(WAYS[name], lambda turn: realistic_pairs(Path(size.data), size.outputs, turn))


def ours(pairs: Any) -> list[bool]:
    """Our verdicts."""
    from vocagnolm.evaluation.extraction import extract
    from vocagnolm.evaluation.grading import worker

    return [worker._judge("free", extract("free", text), gold)[0] for text, gold in pairs]


def harness(pairs: Any) -> list[bool]:
    """The verdicts of the published algorithm."""
    from vocagnolm.evaluation import normalization
    from vocagnolm.evaluation.grading import symbolic

    units = mock.patch.object(normalization, "_remove_units", remove_units)
    reading = mock.patch.object(symbolic, "read_answer", read_answer)
    with units, reading:
        return ours(pairs)


def opinions(pairs: Any) -> list[bool | None]:
    """What math-verify says."""
    from vocagnolm.evaluation.grading import worker

    return [worker._opinion("free", text, gold) for text, gold in pairs]


def both(pairs: Any) -> None:
    """What a worker does for an output."""
    ours(pairs), opinions(pairs)


WAYS: dict[str, Callable[[Any], Any]] = {
    "ours": ours,
    "the harness's algorithm": harness,
    "math-verify, the whole output": opinions,
    "ours, with math-verify's opinion": both,
}


def remove_units(string: str) -> str:
    """Delete unit words, each by a search of its own."""
    from vocagnolm.evaluation.normalization import _UNITS

    for _ in range(2):
        for unit in _UNITS:
            string = re.sub(r"(^|\W)" + unit + r"($|\W)", r"\1\2", string) or string
    return string


def read_answer(text: str) -> Any:
    """Read by the first of three that succeeds."""
    from latex2sympy2_extended import latex2sympy  # type: ignore[import-untyped]
    from sympy.parsing.latex import parse_latex
    from sympy.parsing.sympy_parser import parse_expr

    for read in (parse_latex, parse_expr, latex2sympy):
        for candidate in (text.replace(r"\\", "\\"), text):
            try:
                return read(candidate)
            except Exception:  # noqa: BLE001, PERF203 - any failure, as there
                continue
    return text
