r"""Equality by the harness's rules, `math_equal`, and math-verify's second opinion.

Run this on a model's text only where it can be killed (`grading.py`): sympy may take forever or all
memory. None of the text runs as Python: the harness's `_parse` tries sympy's `parse_latex`, then
sympy's `parse_expr`, which evaluates the text, then latex2sympy. The second is replaced by a walk
over Python's syntax tree, the third by what its verdicts come from: matrices, `~` for a space, and
the number at the start of a text. A text that stays a string meets no sympy function, as some of
them would evaluate it.
"""

import ast
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from math import isclose
from typing import Any, TypeAlias

import math_verify
import sympy
from sympy.parsing.latex import parse_latex

# A number, formula, matrix, bracket or string; sympy names no type for all of these.
Parsed: TypeAlias = Any
_Table: TypeAlias = dict[type[ast.AST], Callable[..., Parsed]]
_OPERATORS: _Table = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    # "7&8" is 0 there.
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.inv,
}
_BRACKETS: _Table = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo}
_FUNCTIONS = {"abs": abs} | {
    name: getattr(sympy, name) for name in "sqrt exp log ln sin cos tan cot sec csc".split()
}
_LEADING_MATRIX = re.compile(r"\(?\\begin\{[pb]matrix\}(.*?)\\end\{[pb]matrix\}\)?", re.DOTALL)
_LEADING_NUMBER = re.compile(r"(-?\d+(?:,\d{3})*(?:\.\d+)?)~*(?:$|\.(?!\d)|&|E(?!\d)|\\\\)")
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
    rows, gold_rows = _rows(found[1]), _rows(expected[1])
    return len(rows) == len(gold_rows) and all(map(_all_equal, rows, gold_rows))


def _rows(matrix: str) -> list[list[str]]:
    return [line.split("&") for line in map(str.strip, matrix.split(r"\\")) if line]


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
    lambda a, b: a.equals(b) or sympy.simplify(a - b) == 0,
    lambda a, b: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
    lambda a, b: isclose(float(sympy.N(a)), float(sympy.N(b)), rel_tol=_TOLERANCE),
    _rounded_equal,
)


def read_answer(text: str) -> Parsed:
    r"""Take the first reading that succeeds, `\\` first taken for `\`; else the text itself."""
    for read in (parse_latex, read_python, read_fragment):
        for candidate in (text.replace(r"\\", "\\"), text):
            with suppress(Exception):  # the reference takes any failure for "cannot be read"
                return read(candidate)
    return text


def read_python(text: str) -> Parsed:
    """Read a Python expression of numbers, names, arithmetic, elementary functions and brackets.

    >>> read_python("{2, 1}"), read_python("'7'"), read_python("2*sqrt(x) # so")
    ({1, 2}, '7', 2*sqrt(x))
    """
    body = ast.parse(text.strip(), mode="eval").body
    if isinstance(body, ast.Constant) and isinstance(body.value, str):
        return body.value
    return _evaluate(body)


def _evaluate(node: ast.AST) -> Parsed:
    # No string in brackets or a call: sympy evaluates one that it receives, even in a tuple.
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return sympy.Number(node.value)
    if isinstance(node, ast.Name):
        return _CONSTANTS.get(node.id, sympy.Symbol(node.id))
    if isinstance(node, ast.UnaryOp | ast.BinOp) and type(node.op) in _OPERATORS:
        children = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
        return _OPERATORS[type(node.op)](*map(_evaluate, children))
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return _BRACKETS[type(node)](map(_evaluate, node.elts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*map(_evaluate, node.args))
    raise ValueError(f"{type(node).__name__} is not read")


def read_fragment(text: str) -> Parsed:
    r"""Read a matrix, the number that opens a text, or a text whose spaces are `~`.

    >>> read_fragment(r"7\\8"), read_fragment("x~+1")
    (7, x + 1)
    >>> read_fragment(r"\begin{pmatrix}1&2\end{pmatrix}")
    Matrix([[1, 2]])
    """
    if matrix := _LEADING_MATRIX.match(text):
        return sympy.Matrix([[parse_latex(cell) for cell in row] for row in _rows(matrix[1])])
    if number := _LEADING_NUMBER.match(text):
        return sympy.Number(number[1].replace(",", ""))
    if "~" in text:
        return parse_latex(text.replace("~", " "))
    raise ValueError("not read")
