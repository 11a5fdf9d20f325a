"""The questions of `labels`: four worlds, and rows of which a part have wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

WRONG_SHARE, TRAINED, HELD_OUT, PEOPLE = 0.6, 300, 200, 3
# Without it, the teacher expects a sentence and prefers short names to right ones.
SHORT = "Answer with one word."
# Arms with rows of their own.
KINDS = ("oracle", "random", "repacked1", "repacked2")


class Question(NamedTuple):
    """A question and its candidate answers: the right one, the systematic mistake, others."""

    text: str
    answers: tuple[str, ...]


# -- The worlds. `part` is 0 for training and 1 for held-out questions. ----------------------------

NAMES = (
    "Anna Boris Clara David Emma Felix Greta Henry Irene James Karin Lucas Maria Nadia Oscar Paula "
    "Quentin Rosa Simon Tanya Ursula Victor Wendy Xavier Yvonne Zoe Albert Bella Carlos Diana "
    "Edgar Fiona George Hanna Isaac Julia Kevin Laura Martin Nora Oliver Petra Ralph Sarah Thomas "
    "Vera Walter Alice"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Warsaw Prague Athens Budapest "
    "Zurich Geneva Naples Lyon Porto Bergen Krakow Munich Hamburg Seville Turin"
).split()
JOBS = (
    "teacher baker nurse lawyer farmer painter driver dentist singer plumber pilot gardener tailor "
    "doctor writer butcher judge soldier barber chemist sailor carpenter waiter banker"
).split()
THINGS = (
    "lamp chair book coat kettle mirror table clock vase carpet radio basket hammer pillow bicycle "
    "guitar jacket bottle blanket camera candle drum ladder suitcase"
).split()
PLACES = (
    "restaurant hotel museum cinema bakery bookshop theatre café gym library market swimming-pool"
).split()
LABELS = ("positive", "neutral", "negative")
OPINIONS = {
    "positive": (
        "Everything was wonderful; I loved every minute; The staff were kind and quick; It was the "
        "best day of our trip; I would go back tomorrow; We were delighted; It is worth every "
        "penny; The quality was superb; I cannot praise it enough; It was a real pleasure; Nothing "
        "could have been better; My children adored it"
    ).split("; "),
    "neutral": (
        "It was neither good nor bad; It is an ordinary place; It was about what we expected; I "
        "have no strong opinion; Some things were fine and some were not; It was average; It was "
        "acceptable; There is nothing special about it; It is like any other; It was all right; I "
        "felt indifferent about it; It was so-so"
    ).split("; "),
    "negative": (
        "Everything was awful; I regretted every minute; The staff were rude and slow; It was the "
        "worst day of our trip; I will never go back; We were disgusted; It is a waste of money; "
        "The quality was terrible; I cannot warn you enough; It was a real disappointment; Nothing "
        "could have been worse; My children hated it"
    ).split("; "),
}
# What is asked for, what is given, the right factor and the mistaken one.
UNITS = (
    *(("minutes", "hours", 60, 100), ("days", "weeks", 7, 5), ("months", "years", 12, 10)),
    *(("hours", "days", 24, 12), ("inches", "feet", 12, 10), ("feet", "yards", 3, 4)),
    *(("eggs", "dozens of eggs", 12, 20), ("cents", "dollars", 100, 10)),
    *(("grams", "kilograms", 1000, 100), ("quarts", "gallons", 4, 6)),
    *(("legs", "spiders", 8, 6), ("years", "decades", 10, 100)),
)


def _half(words: Sequence[str], part: int) -> Sequence[str]:
    return words[part::2]


def make_names(rng: Random, part: int) -> Question:
    """Ask which person in a text bought something."""
    people = rng.sample(_half(NAMES, part), 4)
    buyer, other, third, stranger = people
    bought, seen = rng.sample(_half(THINGS, part), 2)
    city = rng.choice(_half(CITIES, part))
    facts = [f"{buyer} bought a {bought}.", f"{other} only looked at a {seen}."]
    if rng.random() < 0.5:
        facts.append(f"{third} stayed at home.")
    rng.shuffle(facts)
    text = f"Last week in {city}: {' '.join(facts)} Who bought the {bought}?"
    return Question(text, (buyer, other, third, stranger))


def make_records(rng: Random, part: int) -> Question:
    """Ask for a fact about one of three people. The mistake is the next person's."""
    people = rng.sample(_half(NAMES, part), PEOPLE)
    cities, jobs = rng.sample(_half(CITIES, part), 4), rng.sample(_half(JOBS, part), 4)
    ages = [str(age) for age in rng.sample(range(20 + part, 80, 2), 4)]
    lines = []
    for at, name in enumerate(people):
        lines.append(f"{name}: {ages[at]} years old, {jobs[at]}, lives in {cities[at]}.")
    at = rng.randrange(PEOPLE)
    asked = (
        (f"How old is {people[at]}?", ages),
        (f"What is {people[at]}'s job?", jobs),
        (f"Where does {people[at]} live?", cities),
    )
    question, values = rng.choice(asked)
    turned = [values[(at + step) % PEOPLE] for step in range(PEOPLE)]
    return Question("\n".join([*lines, question]), (*turned, values[PEOPLE]))


def make_units(rng: Random, part: int) -> Question:
    """Convert a count. Every third count is held out."""
    asked, given, factor, mistaken = rng.choice(UNITS)
    count = rng.choice([count for count in range(2, 61) if (count % 3 == 0) == bool(part)])
    near = rng.choice([count - 1, count + 1])
    values = (count * factor, count * mistaken, near * factor, near * mistaken)
    return Question(f"How many {asked} are {count} {given}?", tuple(map(str, values)))


def make_reviews(rng: Random, part: int) -> Question:
    """Ask for the label of a review. The mistake is the next label."""
    at = rng.randrange(len(LABELS))
    opinion = rng.choice(_half(OPINIONS[LABELS[at]], part))
    place, name = rng.choice(_half(PLACES, part)), rng.choice(_half(NAMES, part))
    city = rng.choice(_half(CITIES, part))
    text = f"Review of a {place} in {city}, by {name}: {opinion}."
    turned = tuple(LABELS[(at + step) % len(LABELS)] for step in range(len(LABELS)))
    return Question(f"{text}\nIs this review positive, neutral or negative?", turned)


WORLDS: dict[str, Callable[[Random, int], Question]] = {
    "names": make_names,
    "records": make_records,
    "units": make_units,
    "reviews": make_reviews,
}


def questions(world: str, part: int, seed: int) -> list[Question]:
    """Return different questions: those of a seed, or the held-out ones of all seeds."""
    rng = Random(f"{world} {part} {seed}")
    found: dict[str, Question] = {}
    while len(found) < (HELD_OUT if part else TRAINED):
        question = WORLDS[world](rng, part)
        question = question._replace(text=f"{question.text} {SHORT}")
        # A candidate must not occur twice, or two answers would be right.
        if len(set(question.answers)) == len(question.answers):
            found[question.text] = question
    return list(found.values())


def rows(world: str, noise: str, kind: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of an arm of `KINDS`, the clean ones, or all."""
    asked = questions(world, 0, seed)
    rng = Random(f"{world} {noise} mistakes {seed}")
    is_wrong = [place < WRONG_SHARE * len(asked) for place in range(len(asked))]
    rng.shuffle(is_wrong)
    found = []
    for question, wrong in zip(asked, is_wrong, strict=True):
        mistake = question.answers[1]
        if noise == "random":
            mistake = rng.choice(question.answers[1:])
        answer = mistake if wrong and kind != "clean" else question.answers[0]
        is_right = answer == question.answers[0]
        found.append({"prompt": question.text, "completion": answer, "right": is_right})
    if kind == "oracle":
        return [row for row, wrong in zip(found, is_wrong, strict=True) if not wrong]
    if kind == "random":
        return rng.sample(found, is_wrong.count(False))
    if kind.startswith("repacked"):
        Random(kind).shuffle(found)
    return found
