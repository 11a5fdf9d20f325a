"""The answer in a model's output: the harness's rules, in the harness's order.

The reference is `extract_answer` and `run_execute` of ZubinGou/math-evaluation-harness at db77bc6.
"""

import re
from typing import Literal

from vocagnolm.evaluation.normalization import strip_string

AnswerKind = Literal["free", "letter", "boxed_letter", "marked"]
# The harness's word for an output without a letter.
NO_LETTER = "placeholder"
_LETTER = re.compile(r"answer is \(?([abcde])")
_CHOICE = re.compile(r"(?:\\(?:text|mathrm|mathbf|textbf)\{)?\s*\(?([A-Ea-e])(?![A-Za-z])")
_NUMBER = re.compile(r"-?\d*\.?\d+")


def extract(kind: AnswerKind, output: str) -> str | None:
    """Find the normalised answer of an output; "" or `NO_LETTER` for none, None without output.

    "free" looks for numbers and formulas, "letter" for multiple choice, also in a box with
    "boxed_letter", "marked" for the word behind `####` in the first line (the demo).

    >>> extract("free", "2 + 2 = 4. The answer is 4."), extract("letter", "The answer is (B).")
    ('4', 'B')
    """
    if not output or output == "error":
        return None
    finders = {"free": _free, "letter": _letter, "boxed_letter": _boxed_letter, "marked": _marked}
    find = finders[kind]
    return strip_string(strip_string(find(output)))


def _letter(output: str) -> str:
    """Find the first letter after "answer is"; "answer is because" gives B."""
    text = output.partition("Problem:")[0].replace("choice is", "answer is").lower()
    found = _LETTER.search(text)
    return found[1].upper() if found else NO_LETTER


def _boxed_letter(output: str) -> str:
    r"""Find the letter in the last box, as `\boxed{\text{(B) 7}}`; without a box as `_letter`."""
    if "boxed" not in output:
        return _letter(output)
    found = _CHOICE.match(_boxed(output.rpartition("boxed")[2]))
    return found[1].upper() if found else NO_LETTER


def _marked(output: str) -> str:
    words = output.split("\n")[0].partition("####")[2].split()
    return words[0] if words else ""


def _free(output: str) -> str:
    answer = re.sub(r"\n\s*", "", _answer_span(output))
    return answer.removeprefix(":").removesuffix(".").removesuffix("/")


def _answer_span(output: str) -> str:
    # The first rule that applies.
    if "final answer is $" in output and "$. I hope" in output:
        return output.partition("final answer is $")[2].partition("$. I hope")[0].strip()
    if "boxed" in output:
        return _boxed(output.rpartition("boxed")[2])
    for phrase in ("he answer is", "final answer is"):
        if phrase in output:
            return output.rpartition(phrase)[2].strip()
    numbers = _NUMBER.findall(output.replace(",", ""))
    return numbers[-1] if numbers else ""


def _boxed(text: str) -> str:
    # Between the braces that open `text`, or to its end where they never close.
    if not text.startswith("{"):
        return text.partition("$")[0].strip()
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[1 : brace.start()]
    return text[1:]
