"""Answers and verdicts: one table of cases by rule, and the reference's own cases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_grader import InlineGrader, graded_inline
from real_data import real_data
from reference_cases import grade_cases, read_cases, read_table
from sympy.parsing import sympy_parser

from vocagnolm.evaluation.extraction import AnswerKind, extract, strip_string
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.grading.symbolic import (
    algebraically_equal,
    decide,
    parse_number,
    read_answer,
    read_python,
)
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

# A line has a rule and cases of it, `output → gold → verdict`. The verdict is "no", or the rule of
# the grader that finds the output right; without one, the output's answer is the gold, letter for
# letter. Rules named "quirk" are wrong as mathematics, and kept as the published numbers have them.
# "⏎" is a new line, and PMATRIX a matrix.
FREE = r"""
no answer :: error 4 → 4 | I do not know →  → string | I cannot tell. → 7 → no | ∞ →
quirk, no output is the word None ::  → None → string |  → 7 → no
between dollars :: the final answer is $\frac{1}{2}$. I hope → \frac{1}{2}
    | \boxed{3} The final answer is $4$. I hope it is correct. → 4
    | final answer is $1$. I hope. The final answer is $2$. I hope → 1
box :: Thus $\boxed{42}$. → 42 | \boxed 17$ and more → 17 | boxed{x} → x | \boxed{1}, \boxed{2} → 2
    | \boxed{\sqrt{3} → \sqrt{3} | \boxed{1}. The answer is 2. → 1 | \boxed{} → 7 → no
the answer is :: 3 + 4 = 7. The answer is 7. → 7 | xhe answer is 7 → 7
    | The answer is 1. The answer is 2. → 2 | The answer is 7⏎  2. → 72
    | My final answer is 19. → 19 | Final answer is 1. The answer is 2 → 2 | The answer is . →
quirk, words after the answer stay :: The answer is 2. Final answer is 1 → 2Finalansweris1
    | The final answer is 72. I hope it is correct. → 72Ihopeitiscorrect
    | The final answer is 72. I hope it is correct. → 72 → no
    | The answer is Evelyn.⏎I hope → Evelyn → symbolic
last number :: We get 3 and then -4.5 → -4.5 | It is 12, so 7 apples → 7 | about .5 → 0.5
    | It costs 1,234 dollars → 1234 | one of 1, 2, 3 → 3 | we find ٣ → 3
quirk, commas and a minus in the last number :: (1,2,3) → 123 | 5-3 → -3
one colon, one point, one slash :: The answer is: 5. → 5 | The answer is :: 5 → :5
    | The answer is 5/ → 5 | The answer is 5/. → 5 | The answer is 5// → 5/
texts :: The answer is red. → red | The answer is red. → blue → no
    | The answer is RED. → red → symbolic
    | The answer is Yes. → yes → symbolic | The answer is No. → yes → no
numbers by value :: The answer is 18.00. → 18 | The answer is $5.50. → 5.5 → numeric
    | The answer is 1,234. → 1234 → numeric | The answer is 1e3. → 1000 → numeric
    | The answer is -3. → 3 → no | The answer is 19. → 18 → no | The answer is .5. → 0.5
    | The answer is 1_000. → 1000 → numeric | The answer is twenty-five. → 25
quirk, commas anywhere :: The answer is 1,2,3. → 123 → numeric
tolerance of one in ten thousand :: The answer is 0.33333. → 0.33334 → numeric
    | The answer is 0.333. → 0.33334 → no | The answer is 326.53. → 326.5 → numeric
thousands :: The answer is 667\,766. → 667766 → symbolic | The answer is 552.560. → 552560 → no
    | The answer is 12 500. → 12500
quirk, mixed numbers are products :: \boxed{5\frac{5}{8}} → 5.625 → no
    | \boxed{5\frac{5}{8}} → 3.125 → symbolic | The answer is 2:30 P.M.. → 2:30 → no
quirk, a factor of 100 :: The answer is 50%. → 0.5 → numeric | The answer is 0.5. → 50 → numeric
    | The answer is 700. → 7 → numeric | The answer is 7000. → 7 → no
quirk, a formula has no factor of 100 :: \boxed{50} → \frac{1}{2} → no
not a number :: The answer is nan. → nan | The answer is nan. → 7 → no
brackets :: \boxed{(A)} → A → symbolic | \boxed{{3}} → 3 → symbolic | \boxed{[1,2]} → 1,2 → symbolic
tuples by their elements :: \boxed{(1, 2)} → (1,2) | \boxed{(0.5, 2)} → (\frac{1}{2},2) → symbolic
    | \boxed{(2, 1)} → (1,2) → no | \boxed{(1,2,3)} → (1,2) → no
quirk, open intervals are closed ones :: \boxed{[1,2)} → (1,2] → symbolic
    | \boxed{[1,2]} → (1,2) → symbolic
matrices :: \boxed{PMATRIX} → PMATRIX
    | \boxed{\begin{bmatrix} 1.0 \\ 2 \end{bmatrix}} → PMATRIX
    | \boxed{\begin{pmatrix}2\\1\end{pmatrix}} → PMATRIX → no
    | \boxed{\begin{pmatrix}\frac{2}{2}\\2\end{pmatrix}} → PMATRIX → symbolic
equations :: \boxed{y + 1 = 2p} → 2p=y+1 → symbolic | \boxed{2p-q=1} → q+1=2p → symbolic
    | \boxed{2p-q=2} → q+1=2p → no
assignments :: \boxed{n=5} → 5 | \boxed{5} → n=5 → symbolic | \boxed{abc=5} → 5 → no
quirk, an equation stays whole :: The answer is 3*4=12 → 3*4=12 | The answer is 3*4=12. → 12 → no
algebra :: \boxed{(x+1)^2} → x^2+2x+1 → symbolic | \boxed{x+1} → 1+x → symbolic
    | \boxed{x+2} → 1+x → no | \boxed{\sqrt{12}} → 2\sqrt{3} → symbolic | \boxed{\sqrt3} → \sqrt{3}
    | \boxed{\frac{2}{4}} → \frac{1}{2} → symbolic | \boxed{2^{10}} → 1024 → symbolic
    | \boxed{5!} → 120 → symbolic | \boxed{\binom{5}{2}} → 10 → symbolic
    | \boxed{3 \cdot 4} → 12 → symbolic | \boxed{\sin^2 x+\cos^2 x} → 1 → symbolic
    | \boxed{2\pi} → \pi+\pi → symbolic | \boxed{2\pi} → 3\pi → no
formula against decimal :: \boxed{\frac{1}{2}} → 0.5 → symbolic
    | \boxed{1.41421} → \sqrt{2} → symbolic | \boxed{1.41} → \sqrt{2} → no
    | \boxed{0.333} → \frac{1}{3} → no
quirk, what follows a valid beginning is ignored :: \boxed{1} → 1,-2 → symbolic
doubled backslash :: \boxed{\\frac{1}{2}} → \frac{1}{2} → symbolic | \boxed{\\pi} → \pi → symbolic
sets in any order :: \boxed{\{1,2\}} → {1,2} | \boxed{\{2,1\}} → {1,2} → symbolic
    | \boxed{\{1,3\}} → {1,2} → no
quirk, pi is a letter :: \boxed{3.14159} → \pi → no | \boxed{\pi/2} → 0.5\pi → symbolic
powers of ten :: \boxed{1.2 \times 10^6} → 1200000 → symbolic | \boxed{10^{-3}} → 0.001 → symbolic
complex numbers :: \boxed{2i+1} → 1+2i → symbolic | \boxed{1+2j} → 1+2i | \boxed{1-2i} → 1+2i → no
""".replace("PMATRIX", r"\begin{pmatrix}1\\2\end{pmatrix}")
LETTER = r"""
letter :: The answer is (B). → B | the answer is c → C | ANSWER IS (E → E | The answer is (b). → B
    | The answer is (A). → B → no | The answer is (A). The answer is (B). → A
no letter :: The answer is F → placeholder | The answer is $(B)$ → placeholder
    | the answer is  (B) → placeholder | \boxed{B} → placeholder | The answer is 12. → placeholder
choice is :: The correct choice is (D). → D | The Choice is (D). → placeholder
before the next problem :: Problem: The answer is (A) → placeholder
    | The answer is (A) Problem: The answer is (B) → A | problem: The answer is (A) → A
quirk, a word gives a letter :: The answer is because → B | the answer is eleven → E
"""
BOXED_LETTER = r"""
last box :: So \boxed{B}. → B | \boxed{A}, no: \boxed{\text{(d) 7}} → D | $\boxed{\textbf{C}}$ → C
    | \boxed{Because} → placeholder | \boxed{12} → placeholder | The answer is (e). → E
"""
MARKED = r"""
marked :: 1 + 2 = 3 #### 3 → 3 | #### 4 apples → 4 | 1 + 2⏎#### 3 → 3 → no | #### → 3 → no
    | The answer is 3 → 3 → no | #### 700 → 7 → no
"""
# A number must equal the reference. For the harness 500 is 5, 5 is 500, and 999.05 is 999.
INTEGER = r"""
integer :: So it is $\boxed{025}$. → 25 → numeric | \boxed{25.0} → 25
    | The final answer is $1,025$. I hope it is correct. → 1025 → numeric
    | \boxed{\frac{50}{2}} → 25 → symbolic | \boxed{500} → 5 → no | \boxed{5} → 500 → no
    | \boxed{999.05} → 999 → no | I do not know. → 0 → no
"""
TABLES: dict[AnswerKind, str] = {
    "free": FREE,
    "letter": LETTER,
    "boxed_letter": BOXED_LETTER,
    "marked": MARKED,
    "integer": INTEGER,
}


@pytest.fixture(scope="module")
def inline() -> Iterator[InlineGrader]:
    with graded_inline() as grader:
        yield grader


@pytest.mark.parametrize("kind", TABLES)
def test_answers_get_the_harness_verdict(inline: InlineGrader, kind: AnswerKind) -> None:
    for rule, (output, gold, *said) in read_table(TABLES[kind]):
        (verdict,) = inline.grade(kind, [(output, gold)])
        assert verdict.correct == (said != ["no"]), (rule, output, verdict)
        if not said:
            assert verdict.prediction == gold, (rule, output)
        elif verdict.correct:
            assert verdict.decided_by == said[0], (rule, output, verdict)
        assert (verdict.math_verify is None) == (kind not in ("free", "integer"))


# Any text


@given(st.sampled_from(["free", "integer", "letter", "marked"]), st.text())
def test_extraction_is_total(kind: AnswerKind, output: str) -> None:
    assert (extract(kind, output) is None) == (output in ("", "error"))
    assert extract("letter", f"answer is {output}") in {*"ABCDE", "placeholder"}


@given(st.text(alphabet="{}ab1", max_size=30))
def test_extraction_takes_a_box_whole(inner: str) -> None:
    depth, lowest = 0, 0
    for character in inner:
        depth += {"{": 1, "}": -1}.get(character, 0)
        lowest = min(lowest, depth)
    if depth == 0 and lowest == 0:
        expected = strip_string(strip_string(inner))
        assert extract("free", rf"so \boxed{{{inner}}}, really") == expected


# The reference


def check_cases(cases: list[dict[str, Any]], every: int) -> None:
    """Compare predictions and verdicts; of those that need algebra, only one in `every`."""
    algebra = []
    for case in cases:
        prediction, gold = case["prediction"], case["gold"]
        kind = BENCHMARKS[case["benchmark"]].answer_kind
        assert extract(kind, case["raw_output"]) == prediction, case
        if kind == "letter":
            assert (prediction == gold) == case["correct"], case
        elif decided := decide(prediction, gold):
            assert decided[0] == case["correct"], case
        elif case["rule"] != "eq.timeout":
            algebra.append(case)
    with Grader(workers=1) as grader:
        for case, verdict in grade_cases(grader, algebra[::every]):
            assert verdict.decided_by == "symbolic", case
            assert verdict.correct == case["correct"], case


@pytest.mark.processes
def test_answers_agree_with_the_harness() -> None:
    cases = read_cases(Path(__file__).parents[1] / "data/evaluation/cases.jsonl.gz")
    assert len(cases) == 744
    check_cases(cases, every=3)


@pytest.mark.processes
@pytest.mark.slow
def test_all_answers_agree_with_the_harness() -> None:
    """`python -m benchmarks harness_parity` compares those that need algebra, too."""
    cases = read_cases(real_data("data/grading/cases.jsonl.gz"))
    assert len(cases) == 7295
    check_cases(cases, every=8)


# What is read


@pytest.mark.parametrize("text", ["True", "1j", "log(8, base=2)", "f(1)", "x.y", "[i for i in x]"])
def test_python_beyond_arithmetic_is_not_read(text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        read_python(text)


def test_text_that_is_not_read_meets_no_function_of_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even without a worker's restrictions; some functions of sympy evaluate a text."""
    evaluate, evaluated = sympy_parser.eval_expr, []

    def record(code: str, *names: object) -> object:
        evaluated.append(code)
        return evaluate(code, *names)

    monkeypatch.setattr(sympy_parser, "eval_expr", record)
    assert read_answer("'round(7)'") == "round(7)"
    assert not algebraically_equal("'round(7)'", "x")
    # sympy evaluates its own texts, too.
    assert not [code for code in evaluated if "round" in code]


# Numbers and strings

numbers = st.floats(allow_nan=False, allow_infinity=False, width=32).map(str)


@given(st.text(), st.text(), numbers, numbers)
def test_decide_knows_equal_strings_and_is_symmetric(
    text: str, other: str, number: str, other_number: str
) -> None:
    assert decide(text, text) == (True, "string")
    decided = decide(text, other)
    assert decided is None or decided[1] in ("string", "numeric", "empty")
    there, back = decide(number, other_number), decide(other_number, number)
    assert there is not None
    assert back is not None
    assert there[0] == back[0]


@pytest.mark.parametrize(
    ("text", "number"),
    [(r"50\%", 0.5), (" 7 ", 7.0), ("9" * 1_000_000, float("inf")), ("%", None), ("0x10", None)],
)
def test_parse_number_reads_what_float_reads(text: str, number: float | None) -> None:
    assert parse_number(text) == number
