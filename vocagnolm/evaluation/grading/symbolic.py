r"""Equality by the harness's rules, `math_equal`, and math-verify's second opinion.

Run this on a model's text only in a process that can be killed (`grading.py`), because sympy may
need forever or all memory. None of the text runs as Python. The harness's `_parse` tries sympy's
`parse_latex`, then sympy's `parse_expr`, which evaluates the text, then latex2sympy. Here, a walk
over Python's syntax tree replaces the second. In place of the third, the three things are read on
which its verdicts depend: matrices, `~` for a space, and the number at the start of a text. A text
that stays a string is given to no sympy function, because some would evaluate it.
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

# A number, formula, matrix, bracket or string. sympy has no type for all of these.
Parsed: TypeAlias = Any
_Table: TypeAlias = dict[type[ast.AST], Callable[..., Parsed]]
# Texts are evaluated with these operators, brackets, names and functions, and nothing else.
_OPERATORS: _Table = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
    # The harness reads "7&8" as 0.
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.inv,
}
_BRACKETS: _Table = {ast.Tuple: tuple, ast.List: list, ast.Set: set}
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I, "oo": sympy.oo}
_FUNCTIONS: dict[str, Callable[..., Parsed]] = {"abs": abs}
for _name in "sqrt exp log ln sin cos tan cot sec csc".split():
    _FUNCTIONS[_name] = getattr(sympy, _name)
_LEADING_MATRIX = re.compile(r"\(?\\begin\{[pb]matrix\}(.*?)\\end\{[pb]matrix\}\)?", re.DOTALL)
# A number at the start counts if the text ends after it, or if it is followed by a full stop, `&`,
# an E without an exponent or a LaTeX line break.
_LEADING_NUMBER = re.compile(r"(-?\d+(?:,\d{3})*(?:\.\d+)?)~*(?:$|\.(?!\d)|&|E(?!\d)|\\\\)")
_TOLERANCE = 1e-4
_MATRIX = re.compile(r"\\begin\{[pb]matrix\}(.*)\\end\{[pb]matrix\}", re.DOTALL)
_BRACKETED = re.compile(r"[(\[].+[)\]]")


def decide(prediction: str | None, gold: str) -> tuple[bool, str] | None:
    """Return the verdict and its rule, or None if only algebra can tell (one pair in ten).

    A number is right if it equals the reference, or a hundred times or a hundredth of it.

    >>> decide("0.5", "50"), decide("", "7"), decide("x+1", "1+x")
    ((True, 'numeric'), (False, 'empty'), None)
    """
    # Equal texts come first, because they need no parsing.
    if str(prediction) == gold:
        return True, "string"
    number, target = parse_number(str(prediction)), parse_number(gold)
    # Two numbers are decided here, without algebra.
    if number is not None and target is not None:
        for accepted in (target / 100, target, target * 100):
            if isclose(number, accepted, rel_tol=_TOLERANCE):
                return True, "numeric"
        return False, "numeric"
    if not prediction:
        return False, "empty"
    return None


def parse_number(text: str) -> float | None:
    r"""Parse a text without its commas as Python's `float` does; `50%` and `50\%` are 0.5."""
    text = text.replace(",", "")
    try:
        if text.endswith("%"):
            return float(text.removesuffix("%").removesuffix("\\")) / 100
        return float(text)
    except ValueError:
        return None


def algebraically_equal(prediction: str, gold: str) -> bool:
    """Compare two normalised answers by all of the harness's rules."""
    verdict = decide(prediction, gold)
    if verdict:
        return verdict[0]
    gold, prediction = gold.strip(), prediction.strip()
    # A reference in braces, such as {1,2}, is compared as a matrix if the prediction is one.
    if "pmatrix" in prediction and "pmatrix" not in gold:
        matrices = []
        for braced in re.findall(r"\{.*,.*\}", gold):
            entries = braced.strip("{}").replace(",", "\\")
            matrices.append(rf"\begin{{pmatrix}}{entries}\end{{pmatrix}}")
        gold = ", ".join(matrices)
    # Any of these rules is enough. The slowest, which may use up the time limit, comes last.
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
    answers = math_verify.parse(output, parsing_timeout=None)
    return bool(math_verify.verify(expected, answers, timeout_seconds=None))


def _without_brackets(prediction: str, gold: str) -> bool:
    # (1,2) is not [1,2): the brackets of intervals stay if the reference begins with the other
    # kind.
    other_kind = {"[]": "(", "()": "["}
    ends = prediction[:1] + prediction[-1:]
    if ends in other_kind and not gold.startswith(other_kind[ends]):
        prediction, gold = prediction.strip("[]()"), gold.strip("[]()")
    removed = str.maketrans("", "", "{}()")
    return prediction.translate(removed).lower() == gold.translate(removed).lower()


def _all_equal(predictions: list[str], golds: list[str]) -> bool:
    return len(predictions) == len(golds) and all(map(algebraically_equal, predictions, golds))


def _elementwise(prediction: str, gold: str) -> bool:
    # Tuples, intervals and lists are compared entry by entry, without their first and last
    # character, the brackets.
    bracketed = _BRACKETED.match(prediction) and _BRACKETED.match(gold)
    return bool(bracketed) and _all_equal(prediction[1:-1].split(","), gold[1:-1].split(","))


def _matrices_equal(prediction: str, gold: str) -> bool:
    matrix = _MATRIX.fullmatch(prediction)
    gold_matrix = _MATRIX.fullmatch(gold)
    if not (matrix and gold_matrix):
        return False
    rows = _rows(matrix[1])
    gold_rows = _rows(gold_matrix[1])
    return len(rows) == len(gold_rows) and all(map(_all_equal, rows, gold_rows))


def _rows(matrix: str) -> list[list[str]]:
    rows = []
    for line in matrix.split(r"\\"):
        if line.strip():
            rows.append(line.strip().split("&"))
    return rows


def _equations_equal(prediction: str, gold: str) -> bool:
    sides = prediction.split("=")
    gold_sides = gold.split("=")
    # Two equations are equal if the differences of their sides are equal, up to the sign.
    if len(sides) == len(gold_sides) == 2:
        difference = f"{sides[0].strip()} - ({sides[1].strip()})"
        gold_difference = f"{gold_sides[0].strip()} - ({gold_sides[1].strip()})"
        if _expressions_equal(difference, gold_difference):
            return True
        return _expressions_equal(f"-({difference})", gold_difference)
    # If one of the two is an assignment, such as `x = ...`, its right side counts.
    longer, shorter = sorted((sides, gold_sides), key=len, reverse=True)
    if len(longer) != 2 or len(shorter) != 1 or len(longer[0].strip()) > 2:
        return False
    return algebraically_equal(sides[-1], gold_sides[-1])


def _expressions_equal(prediction: str, gold: str) -> bool:
    a = read_answer(prediction)
    b = read_answer(gold)
    # A text that could not be read meets no rule that would evaluate it.
    is_text = isinstance(a, str) or isinstance(b, str)
    for rule in _RULES[:1] if is_text else _RULES:
        # The harness treats any failure as "not equal".
        with suppress(Exception):
            if rule(a, b):
                return True
    return False


def _rounded_equal(a: Parsed, b: Parsed) -> bool:
    if a.shape != b.shape:
        return False
    rounded_a = a.applyfunc(lambda entry: round(entry, 3))
    rounded_b = b.applyfunc(lambda entry: round(entry, 3))
    return bool(rounded_a.equals(rounded_b))


# Answers are equal by any of these rules, tried in the harness's order.
_RULES: tuple[Callable[[Parsed, Parsed], bool], ...] = (
    lambda a, b: str(a) == str(b),
    lambda a, b: a == b,
    lambda a, b: a.equals(b) or sympy.simplify(a - b) == 0,
    lambda a, b: abs(a.lhs - a.rhs).equals(abs(b.lhs - b.rhs)),
    lambda a, b: isclose(float(sympy.N(a)), float(sympy.N(b)), rel_tol=_TOLERANCE),
    _rounded_equal,
)


def read_answer(text: str) -> Parsed:
    r"""Return the first reading that succeeds, or the text. `\\` is first read as `\`."""
    # The harness reads a text with single backslashes for double ones, and then the text as it is.
    for read in (parse_latex, read_python, read_fragment):
        for candidate in (text.replace(r"\\", "\\"), text):
            with suppress(Exception):  # The harness treats any failure as "cannot be read".
                return read(candidate)
    return text


def read_python(text: str) -> Parsed:
    """Read a Python expression of numbers, names, arithmetic, elementary functions and brackets.

    >>> read_python("{2, 1}"), read_python("'7'"), read_python("2*sqrt(x) # so")
    ({1, 2}, '7', 2*sqrt(x))
    """
    # The text is parsed, but never run. A string literal stands for its own characters.
    body = ast.parse(text.strip(), mode="eval").body
    if isinstance(body, ast.Constant) and isinstance(body.value, str):
        return body.value
    return _evaluate(body)


def _evaluate(node: ast.AST) -> Parsed:
    # A string inside brackets or a call is not read, because sympy evaluates any string that it
    # gets, even in a tuple. The exact type is compared, because True is an integer, too. An unknown
    # name or node is an error, and then the text cannot be read.
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
    r"""Read a matrix, the number that begins a text, or a text with `~` for spaces.

    >>> read_fragment(r"7\\8"), read_fragment("x~+1")
    (7, x + 1)
    >>> read_fragment(r"\begin{pmatrix}1&2\end{pmatrix}")
    Matrix([[1, 2]])
    """
    matrix = _LEADING_MATRIX.match(text)
    if matrix:
        rows = _rows(matrix[1])
        return sympy.Matrix([[parse_latex(cell) for cell in row] for row in rows])
    number = _LEADING_NUMBER.match(text)
    if number:
        return sympy.Number(number[1].replace(",", ""))
    if "~" in text:
        return parse_latex(text.replace("~", " "))
    raise ValueError("not read")
