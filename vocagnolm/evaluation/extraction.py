"""The answer in a model's output, in its normal form, by the harness's rules and in its order.

The reference is `extract_answer`, `run_execute` and `strip_string` (from the MATH release) of
ZubinGou/math-evaluation-harness (MIT) at db77bc6, quirks included. What `strip_string` damages is
damaged here too: unit words delete variables ("(a+5)(b+2)" becomes "(+5)(b+2)"), "and" goes out of
"sandwich". Every step takes linear time.
"""

import re
from contextlib import suppress
from typing import Literal

from word2number import w2n

from vocagnolm.shell.io import ASSETS

AnswerKind = Literal["free", "integer", "letter", "boxed_letter", "marked"]
# The harness's word for an output without a letter.
NO_LETTER = "placeholder"
# For the harness, the letter need not be a word of its own.
_LETTER = re.compile(r"answer is \(?([abcde])")
# A box contains only the letter, in parentheses, in a text command, or before the words of the
# option. The first letter of a word is not a choice.
_CHOICE = re.compile(r"(?:\\(?:text|mathrm|mathbf|textbf)\{)?\s*\(?([A-Ea-e])(?![A-Za-z])")
# The reference of a multiple-choice item is only the letter, perhaps in parentheses.
_GOLD_LETTER = re.compile(r"\(?([A-Ea-e])\)?\.?")
_NUMBER = re.compile(r"-?\d*\.?\d+")
# The harness's unit words, as regular expressions, in its order. The second half are the plurals. A
# dot matches any character, as in the harness.
_SINGULARS = (ASSETS / "unit_words.txt").read_text("utf-8").splitlines()
_UNITS = _SINGULARS + [unit + "s" for unit in _SINGULARS]
_WORD = re.compile(r"\w+")
# Each pattern has the first word of its unit. A text without that word cannot contain the unit, so
# most of these slow patterns are never tried.
_UNIT_PATTERNS = []
for _unit in _UNITS:
    _first_word = _WORD.findall(_unit)[0]
    _UNIT_PATTERNS.append((_first_word, re.compile(rf"(^|\W){_unit}($|\W)")))
_ASSIGNMENTS = ("x=", "y=", "z=", r"x\in", r"y\in", r"z\in", r"x\to", r"y\to", r"z\to")


def extract(kind: AnswerKind, output: str) -> str | None:
    """Find the normalised answer of an output; "" or `NO_LETTER` if none, None without an output.

    "free" and "integer" look for numbers and formulas, "letter" for multiple choice. "boxed_letter"
    looks into a box first, and "marked" takes the word after `####` in the first line (the demo).

    Examples:
        >>> extract("free", "2 + 2 = 4. The answer is 4."), extract("letter", "The answer is (B).")
        ('4', 'B')
    """
    if not output or output == "error":
        return None
    finders = {
        "free": _free,
        "integer": _free,
        "letter": _letter,
        "boxed_letter": _boxed_letter,
        "marked": _marked,
    }
    # The harness normalises an answer when it finds it and again when it grades it. The second time
    # may still change it.
    return strip_string(strip_string(finders[kind](output)))


def normalise_gold(kind: AnswerKind, gold: object) -> str:
    """Normalise a reference answer once, as `extract` does with a prediction.

    Raises:
        ValueError: no prediction of its kind could equal it.

    >>> normalise_gold("free", "7 apples."), normalise_gold("letter", "(b)")
    ('7', 'B')
    >>> normalise_gold("integer", "025")
    '25'
    """
    text = str(gold).strip()
    if kind == "integer":
        try:
            return str(int(text))
        except ValueError:
            raise ValueError(f"the gold must be an integer, found {gold}") from None
    if kind in ("letter", "boxed_letter"):
        match = _GOLD_LETTER.fullmatch(text)
        if not match:
            expected = "a letter from A to E"
            raise ValueError(f"the gold of multiple choice must be {expected}, found {gold}")
        # `strip_string` would treat an "a" in parentheses as a unit and delete it.
        return match[1].upper()
    if kind == "marked" and len(text.split()) != 1:
        raise ValueError(f"the gold of an answer after #### must be one word, found {gold}")
    return strip_string(gold)


def _letter(output: str) -> str:
    """Find the first letter after "answer is"; "answer is because" gives B."""
    # After "Problem:" the model asks and answers its own question.
    text = output.partition("Problem:")[0].replace("choice is", "answer is").lower()
    match = _LETTER.search(text)
    return match[1].upper() if match else NO_LETTER


def _boxed_letter(output: str) -> str:
    r"""Find the letter in the last box, such as `\boxed{\text{(B) 7}}`, or else as `_letter`."""
    if "boxed" not in output:
        return _letter(output)
    match = _CHOICE.match(_boxed(output.rpartition("boxed")[2]))
    return match[1].upper() if match else NO_LETTER


def _marked(output: str) -> str:
    words = output.split("\n")[0].partition("####")[2].split()
    return words[0] if words else ""


def _free(output: str) -> str:
    # These rules are tried in order, and the first that applies decides.
    if "final answer is $" in output and "$. I hope" in output:
        answer = output.partition("final answer is $")[2].partition("$. I hope")[0].strip()
    elif "boxed" in output:
        answer = _boxed(output.rpartition("boxed")[2])
    elif "he answer is" in output:
        answer = output.rpartition("he answer is")[2].strip()
    elif "final answer is" in output:
        answer = output.rpartition("final answer is")[2].strip()
    else:
        # Without any of these phrases, the last number of the output counts.
        answer = (_NUMBER.findall(output.replace(",", "")) or [""])[-1]
    answer = re.sub(r"\n\s*", "", answer)
    return answer.removeprefix(":").removesuffix(".").removesuffix("/")


def _boxed(text: str) -> str:
    # The answer is between the braces that open `text`. If they never close, it reaches to the end.
    if not text.startswith("{"):
        return text.partition("$")[0].strip()
    depth = 0
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[1 : brace.start()]
    return text[1:]


def strip_string(text: object) -> str:
    r"""Normalise an answer as the harness does.

    >>> strip_string(r"\dfrac12 \text{ inches}."), strip_string("x = 1,000.00"), strip_string("ten")
    ('\\frac{1}{2}', '1,000', '10')
    """
    # The harness's order of steps matters, because most of them work on what the steps before left.
    string = str(text).strip().replace("\n", "").rstrip(".").replace(r"\!", "")
    string = _unify_commands(string)
    string = _remove_units(string)
    for mark in (r"^{\circ}", r"^\circ", r"\$", "$"):
        string = string.replace(mark, "")
    # Most texts are not a number written in words.
    with suppress(ValueError, LookupError, TypeError):
        string = str(w2n.word_to_num(string))
    string = _replace_groups(string, r"\text{", r"\1")
    for assignment in _ASSIGNMENTS:
        string = string.replace(assignment, "")
    string = string.replace(r"\emptyset", "{}").replace(r"(-\infty,\infty)", r"\mathbb{R}")
    string = string.replace(r"\%", "").replace("%", "")
    string = string.replace(" .", " 0.").replace("{.", "{0.")
    string = string.replace("infinity", r"\infty")
    # The command for infinity contains "inf", which must not be replaced inside it.
    if r"\infty" not in string:
        string = string.replace("inf", r"\infty")
    # The harness misspells the command, so a plus sign before infinity stays.
    string = string.replace(r"+\inity", r"\infty").replace("and", "").replace(r"\mathbf", "")
    string = _replace_groups(string, r"\mbox{", "")
    # Engineers write the imaginary unit as j.
    if "j" in string and "i" not in string:
        string = string.replace("j", "i")
    return _unify_numbers(string)


def _unify_commands(string: str) -> str:
    # Matrices, fractions and brackets get one spelling each, and a `\text{...}` at the end is
    # removed.
    string = _replace_groups(string, r"\begin{array}{", r"\\begin{pmatrix}")
    string = string.replace(r"\end{array}", r"\end{pmatrix}").replace("bmatrix", "pmatrix")
    string = string.replace("tfrac", "frac").replace("dfrac", "frac")
    string = string.replace(r"\left", "").replace(r"\right", "")
    string = string.replace(r"\{", "{").replace(r"\}", "}")
    # If a brace ends the text, everything from the first `\text{` on is removed, unless nothing
    # remains.
    start = string.find(r"\text{") if string.endswith("}") else -1
    shorter = (string if start < 0 else string[:start]).strip()
    return shorter or string


def _replace_groups(string: str, opening: str, replacement: str) -> str:
    r"""Replace every span from `opening` to the next "}"; `\1` is what stands between."""
    # No span ends after the last "}". Looking for one there would take quadratic time.
    closed, brace, after = string.rpartition("}")
    return re.sub(re.escape(opening) + r"([^}]*)}", replacement, closed + brace) + after


def _remove_units(string: str) -> str:
    """Delete unit words between non-word characters, twice, unless nothing would remain."""
    for _ in range(2):
        # Deleting units makes no new words, so the words are found once for all patterns.
        words = set(_WORD.findall(string))
        for word, pattern in _UNIT_PATTERNS:
            if word in words:
                string = pattern.sub(r"\1\2", string) or string
    return string


def _unify_numbers(string: str) -> str:
    """Give decimals, roots, fractions and the rest of an assignment one spelling each."""
    # A decimal point goes with the zeros after it, before another character or at the end.
    string = re.sub(r"(?<=\d)\.0*(\D)", r"\1", string)
    string = re.sub(r"(?<=\d)\.0*$", "", string)
    if not string:
        return string
    if string[0] == ".":
        string = "0" + string
    # A left side of one or two characters is a name, so the right side is the answer.
    sides = string.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        string = sides[1]
    string = re.sub(r"\\sqrt(\w+)", r"\\sqrt{\1}", string).replace(" ", "")
    return _fraction_of_quotient(_brace_fractions(string))


def _brace_fractions(string: str) -> str:
    r"""Turn `\frac12` into `\frac{1}{2}` and `\frac1{72}` into `\frac{1}{72}`; all or none."""
    # Without braces, numerator and denominator are one character each. If a piece is too short for
    # that, the whole text stays as it is.
    pieces = string.split(r"\frac")
    parts = pieces[:1]
    for piece in pieces[1:]:
        if piece.startswith("{"):
            parts.append(piece)
        elif len(piece) < 2:
            return string
        else:
            denominator = piece[1] if piece[1] == "{" else f"{{{piece[1]}}}"
            parts.append(f"{{{piece[0]}}}{denominator}{piece[2:]}")
    return r"\frac".join(parts)


def _fraction_of_quotient(string: str) -> str:
    r"""Turn `3/4` into `\frac{3}{4}` if both are integers or contain `sqrt`."""
    sides = string.split("/")
    if len(sides) != 2:
        return string
    try:
        left, right = (side if "sqrt" in side else str(int(side)) for side in sides)
    except ValueError:  # not an integer, or one with more digits than Python converts
        return string
    # A quotient that Python would write differently, such as 03/4, stays as it is.
    return rf"\frac{{{left}}}{{{right}}}" if string == f"{left}/{right}" else string
