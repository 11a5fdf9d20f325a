"""Extracting answers: a table of cases by rule, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.evaluation.extraction import AnswerKind, extract, normalise_gold, strip_string
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

Case = tuple[str, str, str | None]  # benchmark, output, prediction

# Wrong answers that are kept are marked "quirk".
CASES: dict[str, list[Case]] = {
    "no output": [
        ("gsm8k", "", None),
        ("sat", "", None),
        ("gsm8k", "error", None),
        ("gsm8k", "error 4", "4"),
    ],
    "final answer between dollars": [
        ("math", "Final Answer: The final answer is $12$. I hope it is correct.", "12"),
        ("math", r"the final answer is $\frac{1}{2}$. I hope", r"\frac{1}{2}"),
    ],
    "final answer between dollars comes before a box": [
        ("math", r"\boxed{3} The final answer is $4$. I hope it is correct.", "4"),
    ],
    "first final answer between dollars wins": [
        ("math", "final answer is $1$. I hope. The final answer is $2$. I hope", "1"),
    ],
    "box": [
        ("math", r"Thus $\boxed{42}$.", "42"),
        ("math", r"$\boxed{\frac{a}{b+1}}$ is it", r"\frac{}{b+1}"),  # "a" is a unit word
        ("math", r"\boxed 17$ and more", "17"),
        ("math", "boxed{x}", "x"),
    ],
    "last box wins": [("math", r"\boxed{1}, no, \boxed{2}", "2")],
    "box that never closes is taken to its end": [("math", r"\boxed{\sqrt{3}", r"\sqrt{3}")],
    "box comes before a phrase": [("gsm8k", r"\boxed{1}. The answer is 2.", "1")],
    "the answer is": [
        ("gsm8k", "3 + 4 = 7. The answer is 7.", "7"),
        ("gsm8k", "the answer is 7", "7"),
        ("gsm8k", "xhe answer is 7", "7"),
    ],
    "last of several answers wins": [("gsm8k", "The answer is 1. The answer is 2.", "2")],
    "answer goes on over the lines": [("gsm8k", "The answer is 7\n  2.", "72")],
    "final answer is without the": [("gsm8k", "My final answer is 19.", "19")],
    "the answer is comes before final answer is": [
        ("gsm8k", "Final answer is 1. The answer is 2", "2"),
        ("gsm8k", "The answer is 2. Final answer is 1", "2Finalansweris1"),
    ],
    "last number": [
        ("gsm8k", "We get 3 and then -4.5", "-4.5"),
        ("gsm8k", "It is 12, so 7 apples", "7"),
        ("gsm8k", "about .5", "0.5"),
        ("svamp", "5-3", "-3"),  # quirk: the minus is taken for a sign
    ],
    "commas go before the last number is sought": [
        ("gsm8k", "It costs 1,234 dollars", "1234"),
        ("gsm8k", "one of 1, 2, 3", "3"),
        ("gsm8k", "(1,2,3)", "123"),  # quirk
    ],
    "no number": [("gsm8k", "I do not know", ""), ("mawps", "∞", "")],
    "digits of other scripts": [("gsm8k", "we find ٣", "3")],
    "one colon one point one slash": [
        ("gsm8k", "The answer is: 5.", "5"),
        ("gsm8k", "The answer is :: 5", ":5"),
        ("gsm8k", "The answer is 5/", "5"),
        ("gsm8k", "The answer is 5/.", "5"),
        ("gsm8k", "The answer is 5//", "5/"),
    ],
    "quirk: words after the answer stay": [
        ("math", "The final answer is 72. I hope it is correct.", "72Ihopeitiscorrect"),
        ("gsm8k", "The answer is 3*4=12", "3*4=12"),
    ],
    "letter": [
        ("mmlu_stem", "The answer is (B).", "B"),
        ("sat", "the answer is c", "C"),
        ("mathqa", "ANSWER IS (E", "E"),
        ("mathqa", "The answer is F", "placeholder"),
        ("mmlu_stem", "The answer is $(B)$", "placeholder"),
        ("mmlu_stem", "the answer is  (B)", "placeholder"),
        ("mmlu_stem", r"\boxed{B}", "placeholder"),
    ],
    "first letter wins": [("mathqa", "The answer is (A). The answer is (B).", "A")],
    "choice is stands for answer is": [
        ("sat", "The correct choice is (D).", "D"),
        ("sat", "The Choice is (D).", "placeholder"),  # quirk: replaced before lower-casing
    ],
    "letters are sought before the next problem": [
        ("mathqa", "Problem: The answer is (A)", "placeholder"),
        ("mathqa", "The answer is (A) Problem: The answer is (B)", "A"),
        ("mathqa", "problem: The answer is (A)", "A"),
    ],
    "quirk: a word gives a letter": [
        ("mathqa", "The answer is because", "B"),
        ("mathqa", "the answer is eleven", "E"),
    ],
    "marked": [
        ("demo", "1 + 2 = 3 #### 3", "3"),
        ("demo", "#### 4 apples", "4"),
        ("demo", "1 + 2\n#### 3", ""),
        ("demo", "####", ""),
        ("demo", "The answer is 3", ""),
    ],
}


@pytest.mark.parametrize(
    ("benchmark", "output", "prediction"),
    [
        pytest.param(*case, id=f"{rule}-{number}")
        for rule, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_extraction_gives_the_harness_answer(
    benchmark: str, output: str, prediction: str | None
) -> None:
    assert extract(BENCHMARKS[benchmark].answer_kind, output) == prediction


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        ("integer", "1/2"),
        ("integer", "2.5"),
        ("letter", "F"),
        ("letter", 2),
        ("boxed_letter", ""),
        ("marked", ""),
        ("marked", "a b"),
    ],
)
def test_gold_that_no_prediction_equals_is_rejected(kind: AnswerKind, gold: object) -> None:
    with pytest.raises(ValueError, match=f"found {gold}$"):
        normalise_gold(kind, gold)


@given(st.sampled_from(["free", "integer", "letter", "marked"]), st.text())
def test_extraction_is_total(kind: AnswerKind, output: str) -> None:
    prediction = extract(kind, output)
    assert (prediction is None) == (output in ("", "error"))


@given(st.text())
def test_extraction_gives_a_letter_or_the_placeholder(output: str) -> None:
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
