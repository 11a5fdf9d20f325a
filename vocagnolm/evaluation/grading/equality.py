"""Equality as numbers or strings, steps 1 to 3 of `math_equal`; nine in ten pairs end here."""

from math import isclose
from typing import Literal

DecidedBy = Literal["string", "numeric", "empty", "symbolic", "timeout", "crash"]
RELATIVE_TOLERANCE = 1e-4


def decide(prediction: str | None, gold: str) -> tuple[bool, DecidedBy] | None:
    """Give the verdict and the rule behind it; None where only algebra can tell.

    A number counts as right if it is the gold, a hundred times it or a hundredth of it.

    >>> decide("0.5", "50"), decide("", "7"), decide("x+1", "1+x")
    ((True, 'numeric'), (False, 'empty'), None)
    """
    if str(prediction) == gold:
        return True, "string"
    number, target = parse_number(str(prediction)), parse_number(gold)
    if number is not None and target is not None:
        targets = (target / 100, target, target * 100)
        return any(isclose(number, x, rel_tol=RELATIVE_TOLERANCE) for x in targets), "numeric"
    if not prediction:
        return False, "empty"
    return None


def parse_number(text: str) -> float | None:
    r"""Read a text without its commas as Python's `float` does; `50%` and `50\%` are 0.5."""
    text = text.replace(",", "")
    try:
        if text.endswith("%"):
            return float(text.removesuffix("%").removesuffix("\\")) / 100
        return float(text)
    except ValueError:
        return None
