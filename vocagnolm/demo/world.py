"""The texts of the demo's world, which resemble OpenWebMath.

A page has one grade-school problem with a step-by-step answer, at a random place among lines of
noise (menus, dates, hashes, garbled text, digits). A share of the pages has a wrong solution.
Everything depends only on a `random.Random`, so a seed fixes every character.
"""

import json
import operator
import random
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

HELD_OUT_PROBLEMS = 400
_DATA = yaml.safe_load(Path(__file__).with_name("world.yaml").read_text(encoding="utf-8"))
_NAMES = _DATA["names"].split()
_THINGS = _DATA["things"].split()
_HOLDERS = _DATA["holders"].split()
_MENU = _DATA["menu"].split()
# A wrong result differs from the right one by one of these.
_WRONG_SHIFTS = (-10, -7, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 7, 10)
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
# How the numbers of a problem follow from the drawn ones. The problem takes them from left to
# right, with its operators between them.
_ARRANGED: dict[str, Callable[..., Sequence[int]]] = {
    "as drawn": lambda rng, *drawn: drawn,
    "larger first": lambda rng, a, b: (max(a, b) + 1, min(a, b)),
    "product first": lambda rng, a, b: (a * b, a),
    "from ten": lambda rng, a: (10, a),
    "and a loss": lambda rng, a, b: (a, b, rng.randint(2, a + b - 1)),
}


@dataclass(frozen=True)
class Problem:
    """A question with the steps of its solution, each (left, operator, right, result)."""

    question: str
    steps: tuple[tuple[int, str, int, int], ...]

    @property
    def answer(self) -> int:
        """Final number."""
        return self.steps[-1][3]


def problem(rng: random.Random, excluded: Collection[str] = ()) -> Problem:
    """Draw a problem of a random kind whose question is not in `excluded`."""
    while True:
        kind = rng.choice(_DATA["problems"])
        name, other_name = rng.sample(_NAMES, 2)
        thing = rng.choice(_THINGS)
        holder = rng.choice(_HOLDERS)
        drawn = [rng.randint(2, bound) for bound in kind["up_to"]]
        numbers = _ARRANGED[kind["arranged"]](rng, *drawn)
        forms = kind["questions"]
        # Choosing from a single form would also draw a random number, and so change every later
        # text.
        form = rng.choice(forms) if len(forms) > 1 else forms[0]
        question = form.format(*numbers, name=name, other=other_name, thing=thing, holder=holder)
        if question not in excluded:
            break
    steps = []
    left = numbers[0]
    for symbol, right in zip(kind["operators"], numbers[1:], strict=True):
        result = _OPERATORS[symbol](left, right)
        steps.append((left, symbol, right, result))
        left = result
    return Problem(question, tuple(steps))


def render(item: Problem) -> tuple[str, str]:
    r"""Return the prompt and the solution, which a page has one right after the other.

    >>> render(Problem("How many?", ((5, "+", 7, 12),)))
    ('Q: How many?\nA:', ' 5 + 7 = 12. #### 12')
    """
    steps = " ".join(f"{a} {symbol} {b} = {c}." for a, symbol, b, c in item.steps)
    return f"Q: {item.question}\nA:", f" {steps} #### {item.answer}"


def corrupt(rng: random.Random, item: Problem) -> Problem:
    """Give a problem a wrong solution: another last result, and half the time another operator."""
    left, symbol, right, result = item.steps[-1]
    wrong = result
    # A result below 0 becomes 0. If that is the right result, draw again.
    while wrong == result:
        wrong = max(0, result + rng.choice(_WRONG_SHIFTS))
    if rng.random() < 0.5:
        symbol = rng.choice([operator for operator in _OPERATORS if operator != symbol])
    wrong_step = (left, symbol, right, wrong)
    return replace(item, steps=item.steps[:-1] + (wrong_step,))


def _prose(rng: random.Random) -> str:
    """Return two to four simple sentences without numbers."""
    sentences = []
    for _ in range(rng.randint(2, 4)):
        subject, verb, place, end = [rng.choice(part) for part in _DATA["prose"]]
        sentences.append(f"{subject[0].upper()}{subject[1:]} {verb} {place}{end}")
    return " ".join(sentences)


def noise(rng: random.Random) -> str:
    """Return one line like those around the text of a web page."""
    kind = rng.randrange(5)
    if kind == 0:
        return " | ".join(rng.sample(_MENU, rng.randint(3, 6)))
    if kind == 1:
        user = f"{rng.choice(_NAMES).lower()}{rng.randint(10, 9999)}"
        day = f"{rng.randint(1990, 2023)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return f"Posted by {user} on {day} at {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    if kind == 2:
        digits = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(8, 16)))
        return f"{rng.choice(['id', 'ref', 'sid', 'key'])}={digits}"
    if kind == 3:
        letters = string.ascii_letters + "~^'.,"
        words = []
        for _ in range(rng.randint(3, 6)):
            words.append("".join(rng.choices(letters, k=rng.randint(1, 7))))
        return " ".join(words)
    numbers = []
    for _ in range(rng.randint(4, 8)):
        largest = 10 ** rng.randint(1, 4)
        numbers.append(str(rng.randint(0, largest)))
    return " ".join(numbers)


def page(rng: random.Random, wrong_share: float, excluded: Collection[str] = ()) -> str:
    """Return a web page: a problem with its solution at a random place among lines of noise."""
    # All of these lines draw from one random stream, so their order determines every text.
    lines = [noise(rng) for _ in range(rng.randint(0, 2))]
    item = problem(rng, excluded)
    if rng.random() < wrong_share:
        item = corrupt(rng, item)
    lines.insert(rng.randint(0, len(lines)), "".join(render(item)))
    return "\n".join(lines)


def general_text(rng: random.Random, excluded: Collection[str] = ()) -> str:
    """Return a text of the first pretraining: noise and prose, or a question without its answer."""
    if rng.random() < 0.5:
        lines = [noise(rng) for _ in range(rng.randint(0, 1))]
        lines.append(f"Q: {problem(rng, excluded).question}")
        lines += [noise(rng) for _ in range(rng.randint(0, 1))]
    else:
        lines = [rng.choice([_prose, noise])(rng) for _ in range(rng.randint(2, 4))]
    return "\n".join(lines)


def held_out_problems() -> list[Problem]:
    """Draw the problems that students are judged by. No corpus has their questions."""
    rng = random.Random("held out")
    by_question: dict[str, Problem] = {}
    while len(by_question) < HELD_OUT_PROBLEMS:
        item = problem(rng, by_question)
        by_question[item.question] = item
    return list(by_question.values())


def held_out_questions() -> frozenset[str]:
    """Return the questions that no training text may have."""
    return frozenset(item.question for item in held_out_problems())


def corpus(count: int, seed: int, wrong_share: float) -> list[str]:
    """Draw the pages of a continual pretraining."""
    rng, excluded = random.Random(f"pages {seed}"), held_out_questions()
    return [page(rng, wrong_share, excluded) for _ in range(count)]


def general_corpus(count: int, seed: int) -> list[str]:
    """Draw the texts of a student's first pretraining."""
    rng, excluded = random.Random(f"general {seed}"), held_out_questions()
    return [general_text(rng, excluded) for _ in range(count)]


def conversations(count: int, seed: int) -> list[dict[str, str]]:
    """Draw conversations with one question and its right solution, as `--dataset` reads them."""
    rng, excluded = random.Random(f"conversations {seed}"), held_out_questions()
    rows = []
    for _ in range(count):
        item = problem(rng, excluded)
        _, solution = render(item)
        rows.append({"prompt": item.question, "completion": solution.strip()})
    return rows


def write_jsonl(path: Path, texts: Iterable[str]) -> None:
    """Write texts as a corpus that `--dataset` reads."""
    write_rows(path, ({"text": text} for text in texts))


def write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
