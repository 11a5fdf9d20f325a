r"""The question and the gold answer of one raw row, benchmark by benchmark.

Rows are as in the harness's files; golds are not yet normalised. The reference is `parse_question`
and `parse_ground_truth` of ZubinGou/math-evaluation-harness at db77bc6.
"""

import ast
import re
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from vocagnolm.evaluation.extraction import extract

RawRow = Mapping[str, Any]


def is_asked(benchmark: str, row: RawRow) -> bool:
    """Leave out ASDiv's rows with several answers, separated by semicolons."""
    return benchmark != "asdiv" or ";" not in str(row.get("answer"))


def _gsm8k(row: RawRow) -> tuple[str, object]:
    return row["question"], row["answer"].split("####", 1)[1]


def _math(row: RawRow) -> tuple[str, object]:
    # The last box of the solution, as a model's output would be read. The field `answer` says the
    # same more cleanly; published numbers were not graded by it.
    return row["problem"], extract("free", row["solution"]) or ""


def _svamp(row: RawRow) -> tuple[str, object]:
    body = row["Body"].strip()
    if not body.endswith("."):
        body += "."
    # The hub spells it "145" where the harness has 145.0.
    return f"{body} {row['Question'].strip()}", float(row["Answer"])


def _asdiv(row: RawRow) -> tuple[str, object]:
    # The unit of the answer stands in parentheses.
    gold = re.sub(r"\(.*?\)", "", row["answer"])
    return f"{row['body'].strip()} {row['question'].strip()}", gold


def _tabmwp(row: RawRow) -> tuple[str, object]:
    # A table as text, with its title where it has one, and the options as Python prints a list.
    title = f'regarding "{row["table_title"]}" ' if row["table_title"] else ""
    question = (
        f"Read the following table {title}and answer a question:\n{row['table']}\n{row['question']}"
    )
    if row["choices"]:
        question += f" Please select from the following options: {row['choices']}"
    is_number = row["ans_type"] in ("integer_number", "decimal_number")
    return question, _number(row["answer"]) if is_number else row["answer"]


def _number(text: str) -> float:
    if "/" in text:
        numerator, denominator = text.split("/")
        return int(numerator) / int(denominator)
    if "," in text:
        return float(text.replace(",", ""))
    return float(text.split("%")[0]) / 100 if "%" in text else float(text)


def _mathqa(row: RawRow) -> tuple[str, object]:
    problem, options = row["problem"], _mathqa_options(row["options"].strip())
    return _with_options(problem[:1].upper() + problem[1:], options), str(row["correct"]).upper()


def _mathqa_options(options: str) -> str:
    """Show options written `a ) 1 , b ) 2` as `(A) 1, (B) 2`.

    A few rows hold a Python list of them, as a string.

    >>> _mathqa_options("a ) 3 , 5 , b ) 7"), _mathqa_options("['a ) a ) 4 cm', 'b ) b ) 6 cm']")
    ('(A) 3, 5, (B) 7', '(A) 4 cm, (B) 6 cm')
    """
    if options.startswith("["):
        options = ", ".join(ast.literal_eval(options))
    for letter in "abcde":
        label = f"({letter.upper()}) "
        options = options.replace(f"{letter} ) {letter} ) ", label).replace(f"{letter} ) ", label)
    return options.replace(" , ", ", ")


def _mmlu_stem(row: RawRow) -> tuple[str, object]:
    choices = zip("ABCD", row["choices"], strict=True)
    options = ", ".join(f"({letter}) {text.strip()}" for letter, text in choices)
    return _with_options(row["question"], options), "ABCD"[row["answer"]]


def _sat(row: RawRow) -> tuple[str, object]:
    # From `A) 1 B) 2` to `(A) 1 (B) 2`. Options written `A. 1 B. 2` keep their points: published
    # numbers were made with them.
    options = re.sub(r" ([BCD]\) )", r" (\1", f"({row['options'].strip()}")
    return _with_options(row["question"], options), row["Answer"]


def _with_options(question: str, options: str) -> str:
    return f"{question}\nWhat of the following is the right choice? Explain your answer.\n{options}"


READERS: Mapping[str, Callable[[RawRow], tuple[str, object]]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "svamp": _svamp,
    "asdiv": _asdiv,
    "mawps": itemgetter("input", "target"),
    "tabmwp": _tabmwp,
    "mathqa": _mathqa,
    "mmlu_stem": _mmlu_stem,
    "sat": _sat,
    "gsm_hard": itemgetter("input", "target"),
    "demo": itemgetter("question", "answer"),
}
