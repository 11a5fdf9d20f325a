r"""Text to sympy, without running any of it as Python.

The harness's `_parse` tries sympy's `parse_latex`, then sympy's `parse_expr`, which evaluates the
text, then latex2sympy. The second is replaced by a walk over Python's syntax tree, the third by
what its verdicts come from: matrices, `~` for a space, and the number at the start of a text.
"""

import ast
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

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
_FUNCTIONS = {
    name: getattr(sympy, name)
    for name in ("sqrt", "exp", "log", "ln", "sin", "cos", "tan", "cot", "sec", "csc")
} | {"abs": abs}
_MATRIX = re.compile(r"\(?\\begin\{[pb]matrix\}(.*?)\\end\{[pb]matrix\}\)?", re.DOTALL)
_LEADING_NUMBER = re.compile(r"(-?\d+(?:,\d{3})*(?:\.\d+)?)~*(?:$|\.(?!\d)|&|E(?!\d)|\\\\)")


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
    if matrix := _MATRIX.match(text):
        rows = [row.split("&") for row in map(str.strip, matrix[1].split(r"\\")) if row]
        return sympy.Matrix([[parse_latex(cell) for cell in row] for row in rows])
    if number := _LEADING_NUMBER.match(text):
        return sympy.Number(number[1].replace(",", ""))
    if "~" in text:
        return parse_latex(text.replace("~", " "))
    raise ValueError("not read")
