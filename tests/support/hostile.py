"""Outputs that are meant to hang, crash or take over a grader."""

import random
from collections.abc import Iterator

from vocagnolm.evaluation.extraction import AnswerKind

Pair = tuple[str, str]
_OPENINGS = (
    *("(", "[", "{", "|", r"\frac{", r"\sqrt{", r"\sqrt[3]{", r"\text{", r"\mbox{", r"\left("),
    *("^{", "_{", r"\begin{pmatrix}", r"\begin{array}{", r"\begin{bmatrix}", r"\boxed{", "-", "~"),
    *(r"\sum_{n=1}^{10^9}", r"\prod_{k=1}^{99999}", r"\lim_{x\to0}", r"\log_{", r"\binom{10^6}{"),
    *(r"\int_0^1 ", "sqrt(", "exp(", "abs(", "print(", "eval(", "lambda x:", "not ", "$"),
)
_CLOSINGS = (")", "]", "}", "|", r"\right)", r"\end{pmatrix}", r"\end{array}", "!", "$", "}}", "'")
_PIECES = (
    *("0", "1", "9", "12", "3.50", ".5", "1,000", "1e999", "nan", "inf", "0x1F", "1_000", "٣", "½"),
    *("x", "y", "n", "E", "I", "S", "N", "pi", r"\pi", r"\infty", "oo", "e", "i", "j", "__x__"),
    *("+", "-", "*", "/", "**", "^", "%", "//", "!", "=", "<", r"\le", r"\cdot", "&", r"\\", "\\"),
    *(",", ".", ":", ";", "~", " ", "\n", "\t", "%", r"\%", r"\$", r"\!", r"\in", "'", '"', '"""'),
    *("**9**9", "^{9^{9^9}}", "10^{10^{10}}", "99999!", "(9**9**9,1)", "{9**9**9}", "x=", "k="),
    *("__import__('os').system('touch CANARY')", "__import__('os').mkdir('CANARY')", "exit()"),
    *("(\"__import__('os').mkdir('CANARY')\",1)", "[\"open('CANARY','w')\"]", "f'{open(0)}'"),
    *("log(2,\"__import__('os').mkdir('CANARY')\")", "().__class__.__bases__[0]", "a.b()", "x(1)"),
    *("[i for i in range(10**9)]", "(lambda f:f(f))(lambda f:f(f))", "x if x else y", "x:=1"),
    *("\x00", "\ud800", "\udfff", "\x1b[31m", "\u202e", "\u200b", "\ufeff", "\u2028", "é", "数"),
    *("inches", " degrees ", " and ", " ft ", "dollars", "thousand", "twenty-five", "point", "a"),
    *(r"\frac12", r"\sqrt3", r"\text{ m}", r"^\circ", r"^{\circ}", r"\emptyset", r"\mathbf", "1&2"),
    *(r"\sum_{n=1}^{\infty}\frac{1}{n^2}", r"\int e^{-x^2}dx", r"\frac{d}{dx}", r"\sin", "|x|"),
    *("The answer is ", "the final answer is $", "$. I hope it is correct.", "boxed", "####"),
)
_FRAMES = (
    *("{}", "The answer is {}", "So the answer is {}.", r"Thus $\boxed{{{}}}$", "boxed {}$"),
    *("Final Answer: The final answer is ${}$. I hope it is correct.", "final answer is {}/"),
    *("#### {}", "The answer is (B). {}", "answer is ({}", "the choice is {}"),
)


def hostile_text(rng: random.Random) -> str:
    """Fragments in a row, nested, or many times over; 0 to 20,000 characters."""
    shape = rng.random()
    if shape < 0.7:
        return "".join(rng.choice(_PIECES) for _ in range(rng.randint(0, 12)))
    if shape < 0.92:
        every = (*_OPENINGS, *_PIECES, *_CLOSINGS)
        return "".join(rng.choice(every) for _ in range(rng.randint(1, 40)))
    depth = int(10 ** rng.uniform(0, 3))
    inner, repeat = rng.choice(_PIECES), rng.choice((_OPENINGS, _PIECES))
    closing_piece = rng.choice(("", rng.choice(_CLOSINGS)))
    return (rng.choice(repeat) * depth + inner + closing_piece * depth)[:20_000]


def hostile_pairs(count: int, seed: int) -> Iterator[tuple[AnswerKind, Pair]]:
    """Outputs and golds; one gold in five is hostile too."""
    rng = random.Random(seed)
    golds = ("7", "0.5", r"\frac{1}{2}", "x+1", "(1,2)", r"\begin{pmatrix}1\\2\end{pmatrix}", "B")
    kinds: tuple[AnswerKind, ...] = ("free", "free", "free", "free", "letter", "marked")
    for _ in range(count):
        output = rng.choice(_FRAMES).format(hostile_text(rng))
        gold = hostile_text(rng)[:500] if rng.random() < 0.2 else rng.choice(golds)
        yield rng.choice(kinds), (output, gold)
