"""Equality by the harness's rules, `math_equal`, and math-verify's second opinion.

Run this on a model's text only where it can be killed (`grading.py`): sympy may take forever or all
memory. A text that stays a string meets no sympy function, as some of them would evaluate it.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from math import isclose

import math_verify
from sympy import N, simplify

from vocagnolm.evaluation.grading.reading import Parsed, read_answer

_TOLERANCE = 1e-4
_MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)
_BRACKETED = re.compile(r"[(\[].+[)\]]")


def decide(prediction: str | None, gold: str) -> tuple[bool, str] | None:
    """Give the verdict and the rule behind it; None where only algebra can tell, one pair in ten.

    A number counts as right if it is the gold, a hundred times it or a hundredth of it.

    >>> decide("0.5", "50"), decide("", "7"), decide("x+1", "1+x")
    ((True, 'numeric'), (False, 'empty'), None)
    """
    if str(prediction) == gold:
        return True, "string"
    number, target = parse_number(str(prediction)), parse_number(gold)
    if number is not None and target is not None:
        targets = (target / 100, target, target * 100)
        return any(isclose(number, x, rel_tol=_TOLERANCE) for x in targets), "numeric"
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


def algebraically_equal(prediction: str, gold: str) -> bool:
    """Compare two normalised answers by all of the harness's rules."""
    if verdict := decide(prediction, gold):
        return verdict[0]
    gold, prediction = gold.strip(), prediction.strip()
    if "pmatrix" in prediction and "pmatrix" not in gold:
        lists = (found.strip("{}").replace(",", "\\") for found in re.findall(r"\{.*,.*\}", gold))
        gold = ", ".join(rf"\begin{{pmatrix}}{entries}\end{{pmatrix}}" for entries in lists)
    return any(rule(prediction, gold) for rule in _TEXT_RULES)


def verify(output: str, gold: str) -> bool:
    """Ask math-verify about a whole output, without its own time limits, which need signals."""
    expected = math_verify.parse(f"${gold}$", parsing_timeout=None)
    found = math_verify.parse(output, parsing_timeout=None)
    return bool(math_verify.verify(expected, found, timeout_seconds=None))


def _without_brackets(prediction: str, gold: str) -> bool:
    ends, other = prediction[:1] + prediction[-1:], {"[]": "(", "()": "["}
    if ends in other and not gold.startswith(other[ends]):
        prediction, gold = prediction.strip("[]()"), gold.strip("[]()")
    removed = str.maketrans("", "", "{}()")
    return prediction.translate(removed).lower() == gold.translate(removed).lower()


def _all_equal(predictions: list[str], golds: list[str]) -> bool:
    return len(predictions) == len(golds) and all(map(algebraically_equal, predictions, golds))


def _elementwise(prediction: str, gold: str) -> bool:
    # Tuples, intervals and lists, whatever their brackets, open or closed.
    bracketed = _BRACKETED.match(prediction) and _BRACKETED.match(gold)
    return bool(bracketed) and _all_equal(prediction[1:-1].split(","), gold[1:-1].split(","))


def _matrices_equal(prediction: str, gold: str) -> bool:
    found, expected = _MATRIX.fullmatch(prediction), _MATRIX.fullmatch(gold)
    if not (found and expected):
        return False
    rows, gold_rows = (
        [line.split("&") for line in map(str.strip, matrix[1].split(r"\\")) if line]
        for matrix in (found, expected)
    )
    return len(rows) == len(gold_rows) and all(map(_all_equal, rows, gold_rows))


def _equations_equal(prediction: str, gold: str) -> bool:
    # Both are equations: equal differences of their sides. One is `x = ...`: its right side.
    sides, gold_sides = prediction.split("="), gold.split("=")
    if len(sides) == len(gold_sides) == 2:
        difference, expected = (f"{a.strip()} - ({b.strip()})" for a, b in (sides, gold_sides))
        return any(_expressions_equal(d, expected) for d in (difference, f"-({difference})"))
    longer, shorter = sorted((sides, gold_sides), key=len, reverse=True)
    if len(longer) != 2 or len(shorter) != 1 or len(longer[0].strip()) > 2:
        return False
    return algebraically_equal(sides[-1], gold_sides[-1])


def _expressions_equal(prediction: str, gold: str) -> bool:
    a, b = read_answer(prediction), read_answer(gold)
    for rule in _RULES[:1] if isinstance(a, str) or isinstance(b, str) else _RULES:
        # The reference takes any failure for "not equal".
        with suppress(Exception):
            if rule(a, b):
                return True
    return False


def _rounded_equal(a: Parsed, b: Parsed) -> bool:
    rounded = [m.applyfunc(lambda entry: round(entry, 3)) for m in (a, b)]
    return a.shape == b.shape and bool(rounded[0].equals(rounded[1]))


# Any one of them, in the reference's order; a text that was not read meets the first alone.
_RULES: tuple[Callable[[Parsed, Parsed], bool], ...] = (
    lambda a, b: str(a) == str(b),
    lambda a, b: a == b,
    lambda a, b: a.equals(b) or simplify(a - b) == 0,
    lambda a, b: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
    lambda a, b: isclose(float(N(a)), float(N(b)), rel_tol=_TOLERANCE),
    _rounded_equal,
)
_TEXT_RULES = (
    _without_brackets,
    _elementwise,
    _matrices_equal,
    _equations_equal,
    _expressions_equal,
)
