r"""The question and the gold answer of one raw row, benchmark by benchmark.

Enters: a row as it stands in the harness's file, its fields checked. Leaves: the question as the
prompt carries it, and the gold before it is normalised. No row is changed. The reference is
`parse_question` and `parse_ground_truth` of ZubinGou/math-evaluation-harness at db77bc6.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from vocagnolm.evaluation.grading.extraction import extract

Row = Mapping[str, Any]


def is_asked(benchmark: str, row: Row) -> bool:
    """Leave out ASDiv's rows with several answers, separated by semicolons."""
    return benchmark != "asdiv" or ";" not in str(row.get("answer"))


# Questions


def _svamp_question(row: Row) -> str:
    """The story, closed with a full stop, and the question about it."""
    body = row["Body"].strip()
    if not body.endswith("."):
        body += "."
    return f"{body} {row['Question'].strip()}"


def _asdiv_question(row: Row) -> str:
    return f"{row['body'].strip()} {row['question'].strip()}"


def _tabmwp_question(row: Row) -> str:
    """A table as text, with its title where it has one, and the options as Python prints a list."""
    title = f'regarding "{row["table_title"]}" ' if row["table_title"] else ""
    question = (
        f"Read the following table {title}and answer a question:\n{row['table']}\n{row['question']}"
    )
    if row["choices"]:
        question += f" Please select from the following options: {row['choices']}"
    return question


def _mathqa_question(row: Row) -> str:
    """The problem with a capital, and options written `a ) 1 , b ) 2` as `(A) 1, (B) 2`."""
    problem = row["problem"]
    return _with_options(problem[:1].upper() + problem[1:], _mathqa_options(row["options"].strip()))


def _mathqa_options(options: str) -> str:
    """Options as the prompt shows them; a few rows hold a Python list of them, as a string.

    >>> _mathqa_options("a ) 3 , 5 , b ) 7"), _mathqa_options("['a ) a ) 4 cm', 'b ) b ) 6 cm']")
    ('(A) 3, 5, (B) 7', '(A) 4 cm, (B) 6 cm')
    """
    if options.startswith("["):
        options = ", ".join(_listed(options))
    for letter in "abcde":
        label = f"({letter.upper()}) "
        options = options.replace(f"{letter} ) {letter} ) ", label).replace(f"{letter} ) ", label)
    return options.replace(" , ", ", ")


def _listed(options: str) -> list[str]:
    try:
        texts = ast.literal_eval(options)
    except (SyntaxError, ValueError):
        texts = None
    if not _is_texts(texts):
        raise ValueError(f"expected `options` to spell a list of texts, found {options!r:.80}")
    return list(texts)


def _mmlu_question(row: Row) -> str:
    """The question and its four options, lettered and joined with commas."""
    choices = row["choices"]
    if not _is_texts(choices) or len(choices) != 4:
        raise ValueError(f"expected `choices` to be 4 texts, found {choices!r:.80}")
    lettered = (f"({letter}) {text.strip()}" for letter, text in zip("ABCD", choices, strict=True))
    return _with_options(row["question"], ", ".join(lettered))


def _is_texts(values: object) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _sat_question(row: Row) -> str:
    """The question and its options, from `A) 1 B) 2` to `(A) 1 (B) 2`."""
    # Options written `A. 1 B. 2` keep their points: published numbers were made with them.
    options = f"({row['options'].strip()}"
    return _with_options(row["question"], re.sub(r" ([BCD]\) )", r" (\1", options))


def _with_options(question: str, options: str) -> str:
    return f"{question}\nWhat of the following is the right choice? Explain your answer.\n{options}"


QUESTIONS: Mapping[str, Callable[[Row], str]] = {
    "gsm8k": itemgetter("question"),
    "math": itemgetter("problem"),
    "svamp": _svamp_question,
    "asdiv": _asdiv_question,
    "mawps": itemgetter("input"),
    "tabmwp": _tabmwp_question,
    "mathqa": _mathqa_question,
    "mmlu_stem": _mmlu_question,
    "sat": _sat_question,
    "gsm_hard": itemgetter("input"),
    "demo": itemgetter("question"),
}

# Gold answers


def _gsm8k_gold(row: Row) -> str:
    _, mark, gold = row["answer"].partition("####")
    if not mark:
        raise ValueError("expected `answer` to end in #### and a number, found no ####")
    return str(gold)


def _math_gold(row: Row) -> str:
    """The last box of the solution, as a model's output would be read."""
    # The field `answer` says the same more cleanly; published numbers were not graded by it.
    return extract("free", row["solution"]) or ""


def _svamp_gold(row: Row) -> float:
    # The hub spells it "145" where the harness has 145.0.
    return float(row["Answer"])


def _asdiv_gold(row: Row) -> str:
    """The answer without its unit, which stands in parentheses."""
    return re.sub(r"\(.*?\)", "", row["answer"])


def _tabmwp_gold(row: Row) -> str:
    """The answer as text; numbers as Python prints the float of them."""
    answer: str = row["answer"]
    if row["ans_type"] not in ("integer_number", "decimal_number"):
        return answer
    if "/" in answer:
        numerator, denominator = answer.split("/")
        return str(int(numerator) / int(denominator))
    if "," in answer:
        return str(float(answer.replace(",", "")))
    if "%" in answer:
        return str(float(answer.split("%")[0]) / 100)
    return str(float(answer))


def _mathqa_gold(row: Row) -> str:
    return str(row["correct"]).upper()


def _mmlu_gold(row: Row) -> str:
    """The letter at the position of the right option, counted from 0."""
    position = row["answer"]
    if position not in range(4):
        raise ValueError(f"expected `answer` from 0 to 3, found {position}")
    return "ABCD"[position]


GOLDS: Mapping[str, Callable[[Row], object]] = {
    "gsm8k": _gsm8k_gold,
    "math": _math_gold,
    "svamp": _svamp_gold,
    "asdiv": _asdiv_gold,
    "mawps": itemgetter("target"),
    "tabmwp": _tabmwp_gold,
    "mathqa": _mathqa_gold,
    "mmlu_stem": _mmlu_gold,
    "sat": itemgetter("Answer"),
    "gsm_hard": itemgetter("target"),
    "demo": itemgetter("answer"),
}
