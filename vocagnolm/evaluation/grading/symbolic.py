"""Equality by algebra: the harness's rules with sympy, and math-verify's second opinion.

Run this on a model's text only where it can be killed (`grading.py`): sympy may take forever or all
memory. The reference is `math_equal` of ZubinGou/math-evaluation-harness at db77bc6. A text that
stays a string after `read_answer` meets no sympy function, as some of them would evaluate it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isclose
from typing import TypeAlias

import math_verify
from sympy import N, simplify

from vocagnolm.evaluation.grading.equality import RELATIVE_TOLERANCE, decide
from vocagnolm.evaluation.grading.reading import Parsed, read_answer

_MATRIX_STARTS = (r"\begin{pmatrix}", r"\begin{bmatrix}")
_MATRIX_ENDS = (r"\end{pmatrix}", r"\end{bmatrix}")
Rule: TypeAlias = Callable[[Parsed, Parsed], bool]
_BRACKETED = re.compile(r"[(\[].+[)\]]")


def algebraically_equal(prediction: str, gold: str) -> bool:
    """Compare two normalised answers by all of the harness's rules."""
    if verdict := decide(prediction, gold):
        return verdict[0]
    gold, prediction = gold.strip(), prediction.strip()
    if "pmatrix" in prediction and "pmatrix" not in gold:
        gold = _matrix_of_list(gold)
    return (
        _without_brackets(prediction, gold)
        or _elementwise(prediction, gold)
        or _matrices_equal(prediction, gold)
        or _equations_equal(prediction, gold)
        or _expressions_equal(prediction, gold)
    )


def verify(output: str, gold: str) -> bool:
    """Ask math-verify about a whole output, without its own time limits, which need signals."""
    expected = math_verify.parse(f"${gold}$", parsing_timeout=None)
    found = math_verify.parse(output, parsing_timeout=None)
    return bool(math_verify.verify(expected, found, timeout_seconds=None))


def _matrix_of_list(text: str) -> str:
    lists = [found.strip("{}").replace(",", "\\") for found in re.findall(r"\{.*,.*\}", text)]
    return ", ".join(rf"\begin{{pmatrix}}{entries}\end{{pmatrix}}" for entries in lists)


def _without_brackets(prediction: str, gold: str) -> bool:
    if any(
        _enclosed(prediction, brackets) and not gold.startswith(other)
        for brackets, other in (("[]", "("), ("()", "["))
    ):
        prediction, gold = prediction.strip("[]()"), gold.strip("[]()")
    removed = str.maketrans("", "", "{}()")
    return prediction.translate(removed).lower() == gold.translate(removed).lower()


def _enclosed(text: str, brackets: str) -> bool:
    return text.startswith(brackets[0]) and text.endswith(brackets[1])


def _all_equal(predictions: list[str], golds: list[str]) -> bool:
    return len(predictions) == len(golds) and all(map(algebraically_equal, predictions, golds))


def _elementwise(prediction: str, gold: str) -> bool:
    """Tuples, intervals and lists, whatever their brackets, open or closed."""
    if not (_BRACKETED.match(prediction) and _BRACKETED.match(gold)):
        return False
    return _all_equal(prediction[1:-1].split(","), gold[1:-1].split(","))


def _matrices_equal(prediction: str, gold: str) -> bool:
    rows, gold_rows = _matrix_rows(prediction), _matrix_rows(gold)
    if rows is None or gold_rows is None or len(rows) != len(gold_rows):
        return False
    return all(map(_all_equal, rows, gold_rows))


def _matrix_rows(text: str) -> list[list[str]] | None:
    if not (text.startswith(_MATRIX_STARTS) and text.endswith(_MATRIX_ENDS)):
        return None
    lines = map(str.strip, text[len(_MATRIX_STARTS[0]) : -len(_MATRIX_ENDS[0])].split(r"\\"))
    return [line.split("&") for line in lines if line]


def _equations_equal(prediction: str, gold: str) -> bool:
    """Both are equations: equal differences of their sides. One is `x = ...`: its right side."""
    sides, gold_sides = prediction.split("="), gold.split("=")
    if len(sides) == len(gold_sides) == 2:
        difference, expected = (f"{a.strip()} - ({b.strip()})" for a, b in (sides, gold_sides))
        return any(_expressions_equal(d, expected) for d in (difference, f"-({difference})"))
    if len(sides) == 2 and len(sides[0].strip()) <= 2 and len(gold_sides) == 1:
        return algebraically_equal(sides[1], gold)
    if len(gold_sides) == 2 and len(gold_sides[0].strip()) <= 2 and len(sides) == 1:
        return algebraically_equal(prediction, gold_sides[1])
    return False


def _expressions_equal(prediction: str, gold: str) -> bool:
    a, b = read_answer(prediction), read_answer(gold)
    if _holds(lambda a, b: str(a) == str(b), a, b):
        return True
    if isinstance(a, str) or isinstance(b, str):
        return False
    return any(_holds(rule, a, b) for rule in _RULES)


def _holds(rule: Rule, a: Parsed, b: Parsed) -> bool:
    try:
        return bool(rule(a, b))
    except Exception:  # noqa: BLE001 - the reference takes any failure for "not equal"
        return False


def _numerically_close(a: Parsed, b: Parsed) -> bool:
    return isclose(float(N(a)), float(N(b)), rel_tol=RELATIVE_TOLERANCE)


def _rounded_equal(a: Parsed, b: Parsed) -> bool:
    if a.shape != b.shape:
        return False
    rounded = (m.applyfunc(lambda entry: round(entry, 3)) for m in (a, b))
    return bool(next(rounded).equals(next(rounded)))


# Any one of them, in the reference's order.
_RULES: tuple[Rule, ...] = (
    lambda a, b: a == b,
    lambda a, b: a.equals(b) or simplify(a - b) == 0,
    lambda a, b: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
    _numerically_close,
    _rounded_equal,
)
