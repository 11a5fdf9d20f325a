"""The text of the embedded world, made the way OpenWebMath is.

A page carries one grade-school problem with a step-by-step answer at a random place among noise
lines (menus, dates, hashes, garbled text, digit runs). A share of the pages has a wrong solution.
Everything is a function of a `random.Random`, so a seed fixes every character.
"""

import json
import random
import string
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

NAMES = "Tom Anna Ben Lucy Sam Nora Jack Mia Omar Zoe Liam Emma Noah Ava Eli Ivy Max Ruth Leo Tara"
OBJECTS = (
    "apples pens books coins cards shells stamps marbles cookies stickers eggs plums keys cups"
)
CONTAINERS = "boxes bags jars trays baskets crates"
MENU = (
    "Home About Login Contact Forum Help Search Archive Privacy Terms Next Previous Reply Share "
    "Print Page Topic Post User Guest"
)
SUBJECTS = (
    "the man,a teacher,my friend,the old dog,our city,the river,a small bird,the child,her mother,"
    "the weather"
)
VERBS = (
    "walked to,looked at,talked about,was near,came from,wrote about,liked,waited for,went past,"
    "dreamed of"
)
PLACES = (
    "the house,a garden,the school,the sea,an empty street,the market,the hill,a letter,the window,"
    "the music"
)
ENDINGS = ("", " in the morning", " after lunch", " at night", " with a smile")
HELD_OUT_PROBLEMS = 400
WRONG_SHIFTS = (-10, -7, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 7, 10)

Step = tuple[int, str, int, int]


@dataclass(frozen=True)
class Problem:
    """A question with the steps of its solution: (left, operator, right, result) each."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """Final number."""
        return self.steps[-1][3]


def _calculate(left: int, operator: str, right: int) -> Step:
    results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
    return left, operator, right, results[operator]


@dataclass(frozen=True)
class _Cast:
    """Who and what a problem is about."""

    name: str
    other: str
    thing: str
    holder: str


def _cast(rng: random.Random) -> _Cast:
    name, other = rng.sample(NAMES.split(), 2)
    return _Cast(name, other, rng.choice(OBJECTS.split()), rng.choice(CONTAINERS.split()))


def _add(rng: random.Random, c: _Cast) -> Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    question = rng.choice(
        [
            f"{c.name} has {a} {c.thing}. {c.name} buys {b} more {c.thing}. "
            f"How many {c.thing} does {c.name} have now?",
            f"{c.name} found {a} {c.thing} on Monday and {b} {c.thing} on Friday. "
            f"How many {c.thing} did {c.name} find?",
        ]
    )
    return Problem(question, (_calculate(a, "+", b),))


def _subtract(rng: random.Random, c: _Cast) -> Problem:
    b, a = sorted((rng.randint(2, 9), rng.randint(2, 9)))
    a += 1
    question = rng.choice(
        [
            f"{c.name} had {a} {c.thing} and gave {b} of them to {c.other}. "
            f"How many {c.thing} are left?",
            f"There were {a} {c.thing} on the table. {c.name} took {b} of them. "
            f"How many {c.thing} are left?",
        ]
    )
    return Problem(question, (_calculate(a, "-", b),))


def _compare(rng: random.Random, c: _Cast) -> Problem:
    b, a = sorted((rng.randint(2, 9), rng.randint(2, 9)))
    a += 1
    question = (
        f"{c.name} has {a} {c.thing} and {c.other} has {b} {c.thing}. "
        f"How many more {c.thing} does {c.name} have?"
    )
    return Problem(question, (_calculate(a, "-", b),))


def _multiply(rng: random.Random, c: _Cast) -> Problem:
    a, b = rng.randint(2, 5), rng.randint(2, 9)
    question = rng.choice(
        [
            f"There are {a} {c.holder} with {b} {c.thing} in each. "
            f"How many {c.thing} are there in total?",
            f"{c.name} fills {a} {c.holder}. Each one holds {b} {c.thing}. "
            f"How many {c.thing} does {c.name} need?",
        ]
    )
    return Problem(question, (_calculate(a, "*", b),))


def _divide(rng: random.Random, c: _Cast) -> Problem:
    a, b = rng.randint(2, 5), rng.randint(2, 9)
    question = (
        f"{c.name} shares {a * b} {c.thing} equally among {a} friends. "
        f"How many {c.thing} does each friend get?"
    )
    return Problem(question, (_calculate(a * b, "/", a),))


def _change(rng: random.Random, c: _Cast) -> Problem:
    price = rng.randint(2, 9)
    question = (
        f"The {c.thing} cost {price} dollars. {c.name} pays with 10 dollars. "
        f"How many dollars of change does {c.name} get?"
    )
    return Problem(question, (_calculate(10, "-", price),))


def _add_then_subtract(rng: random.Random, c: _Cast) -> Problem:
    a, b = rng.randint(2, 5), rng.randint(2, 5)
    d = rng.randint(2, a + b - 1)
    question = (
        f"{c.name} has {a} {c.thing} and {c.other} has {b} {c.thing}. "
        f"They lose {d} of them. How many {c.thing} do they still have?"
    )
    return Problem(question, (_calculate(a, "+", b), _calculate(a + b, "-", d)))


def _multiply_then_add(rng: random.Random, c: _Cast) -> Problem:
    a, b, d = rng.randint(2, 3), rng.randint(2, 5), rng.randint(2, 5)
    question = (
        f"{c.name} buys {a} {c.holder} of {b} {c.thing} each and already had {d} {c.thing}. "
        f"How many {c.thing} does {c.name} have?"
    )
    return Problem(question, (_calculate(a, "*", b), _calculate(a * b, "+", d)))


KINDS: dict[str, Callable[[random.Random, _Cast], Problem]] = {
    "add": _add,
    "subtract": _subtract,
    "compare": _compare,
    "multiply": _multiply,
    "divide": _divide,
    "change": _change,
    "add_then_subtract": _add_then_subtract,
    "multiply_then_add": _multiply_then_add,
}


def problem(rng: random.Random, excluded: Collection[str] = ()) -> Problem:
    """Draw a problem of a random kind whose question is not among `excluded`."""
    while True:
        made = rng.choice(list(KINDS.values()))(rng, _cast(rng))
        if made.question not in excluded:
            return made


def render(item: Problem) -> tuple[str, str]:
    r"""Write a problem as text.

    Returns:
        The prompt and the solution; the page holds one right after the other.

    >>> render(Problem("How many?", ((5, "+", 7, 12),)))
    ('Q: How many?\nA:', ' 5 + 7 = 12. #### 12')
    """
    steps = " ".join(f"{a} {operator} {b} = {c}." for a, operator, b, c in item.steps)
    return f"Q: {item.question}\nA:", f" {steps} #### {item.answer}"


def corrupt(rng: random.Random, item: Problem) -> Problem:
    """Give a problem a wrong solution: the last result is off, half the time the operator too."""
    left, operator, right, result = item.steps[-1]
    wrong = result
    while wrong == result:
        wrong = max(0, result + rng.choice(WRONG_SHIFTS))
    if rng.random() < 0.5:
        operator = rng.choice([x for x in "+-*/" if x != operator])
    return replace(item, steps=(*item.steps[:-1], (left, operator, right, wrong)))


def prose(rng: random.Random) -> str:
    """Two to four simple sentences about no numbers."""
    sentences = []
    for _ in range(rng.randint(2, 4)):
        subject, verb, place = (rng.choice(x.split(",")) for x in (SUBJECTS, VERBS, PLACES))
        sentences.append(f"{subject[0].upper()}{subject[1:]} {verb} {place}{rng.choice(ENDINGS)}.")
    return " ".join(sentences)


def noise(rng: random.Random) -> str:
    """One line as web pages have around their text."""
    kind = rng.randrange(5)
    if kind == 0:
        return " | ".join(rng.sample(MENU.split(), rng.randint(3, 6)))
    if kind == 1:
        user = f"{rng.choice(NAMES.split()).lower()}{rng.randint(10, 9999)}"
        day = f"{rng.randint(1990, 2023)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
        return f"Posted by {user} on {day} at {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    if kind == 2:
        digits = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(8, 16)))
        return f"{rng.choice(['id', 'ref', 'sid', 'key'])}={digits}"
    if kind == 3:
        letters = string.ascii_letters + "~^'.,"
        words = (
            "".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(rng.randint(3, 6))
        )
        return " ".join(words)
    return " ".join(str(rng.randint(0, 10 ** rng.randint(1, 4))) for _ in range(rng.randint(4, 8)))


def page(
    rng: random.Random,
    wrong_share: float,
    excluded: Collection[str] = (),
    noise_lines: tuple[int, int] = (0, 2),
) -> str:
    """One web page: a problem with its solution at a random place among noise lines.

    Args:
        rng: Where the randomness comes from.
        wrong_share: Probability that the solution is a wrong one.
        excluded: Questions that must not be on the page (the held-out ones).
        noise_lines: The least and the most lines of noise.
    """
    lines = [noise(rng) for _ in range(rng.randint(*noise_lines))]
    item = problem(rng, excluded)
    if rng.random() < wrong_share:
        item = corrupt(rng, item)
    lines.insert(rng.randint(0, len(lines)), "".join(render(item)))
    return "\n".join(lines)


def general_text(
    rng: random.Random, question_share: float = 0.5, excluded: Collection[str] = ()
) -> str:
    """A text of the first pretraining: noise and prose, or a question without its answer."""
    if rng.random() < question_share:
        lines = [noise(rng) for _ in range(rng.randint(0, 1))]
        lines.append(f"Q: {problem(rng, excluded).question}")
        lines += [noise(rng) for _ in range(rng.randint(0, 1))]
        return "\n".join(lines)
    return "\n".join(rng.choice([prose, noise])(rng) for _ in range(rng.randint(2, 4)))


def held_out_problems() -> list[Problem]:
    """Draw the problems that judge the students; no corpus holds their questions."""
    rng = random.Random("held out")
    found: dict[str, Problem] = {}
    while len(found) < HELD_OUT_PROBLEMS:
        item = problem(rng, found)
        found[item.question] = item
    return list(found.values())


def held_out_questions() -> frozenset[str]:
    """Return the questions to exclude from every text that a model learns from."""
    return frozenset(item.question for item in held_out_problems())


def corpus(count: int, seed: int, wrong_share: float, excluded: Collection[str]) -> Iterator[str]:
    """Draw the pages of a continual pretraining."""
    rng = random.Random(f"pages {seed}")
    return (page(rng, wrong_share, excluded) for _ in range(count))


def general_corpus(count: int, seed: int, excluded: Collection[str]) -> Iterator[str]:
    """Draw the texts of a student's first pretraining."""
    rng = random.Random(f"general {seed}")
    return (general_text(rng, excluded=excluded) for _ in range(count))


def write_jsonl(path: Path, texts: Iterable[str]) -> None:
    """Write texts as a corpus that `--dataset` reads."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
