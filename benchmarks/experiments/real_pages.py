"""The pages on which `real` trains pretrained models, and the clean text that judges them.

Documents come from four corpora of mathematics: GSM8K's and MATH's training problems, PlanetMath,
and textbooks. Three worlds share them, so that a teacher reads most documents once:

    clean   problems and passages as they are
    noisy   40 % of the problems carry the solution of another problem
    mixed   half of the documents are clean; a quarter are source code, and a quarter have
            boilerplate of web pages between the words

`reference` has other clean pages, for Rho-1's reference model.

Each line of a corpus is a JSON object with the field `text`:

    gsm8k_train.jsonl           openai/grade-school-math, train: question, newline, solution without
                                calculator marks, with "The answer is N." in place of "#### N"
    math_train.jsonl            hendrycks/math, train: problem, blank line, solution
    planetmath.jsonl            the repositories of github.com/planetmath, one article a line, LaTeX
    openlogic.jsonl             OpenLogicProject/OpenLogic, content/, one section a line, LaTeX
    statistics_textbook.jsonl   OpenIntroStat/openintro-statistics, ch_*/TeX, one section a line
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from benchmarks.experiments.worlds import insert

WORLDS = ("noisy", "clean", "mixed")
WRONG_SHARE = 0.4
# A page is cut to this length, so that one long article does not fill a run.
PAGE_CHARACTERS = 1500
HELD_OUT = 60  # documents of each kind
# The reference's documents begin here, after those of every page.
REFERENCE_START = 600
# The file, and what separates a problem from its solution.
PROBLEMS = {"gsm8k": ("gsm8k_train.jsonl", "\n"), "math": ("math_train.jsonl", "\n\n")}
ARTICLES = {
    "planetmath": ("planetmath.jsonl",),
    "textbooks": ("openlogic.jsonl", "statistics_textbook.jsonl"),
}
KINDS = (*PROBLEMS, *ARTICLES)
# The kinds of nine consecutive pages. GSM8K has the most, because its pages are the shortest.
TURNS = ("gsm8k", "gsm8k", "math", "gsm8k", "planetmath", "gsm8k", "math", "gsm8k", "textbooks")


def read_documents(corpora: Path) -> dict[str, list[str]]:
    """Return the documents of every kind, in a fixed random order, at most a page long.

    Args:
        corpora: a directory with the files of `PROBLEMS` and `ARTICLES`.
    """
    files = {kind: (name,) for kind, (name, _) in PROBLEMS.items()} | ARTICLES
    documents = {}
    for kind, names in files.items():
        texts = {}
        for name in names:
            for line in (corpora / name).read_text(encoding="utf-8").splitlines():
                page = json.loads(line)["text"][:PAGE_CHARACTERS]
                if kind in PROBLEMS and PROBLEMS[kind][1] not in page:
                    continue  # the problem alone fills a page
                # A dictionary drops repeated texts and keeps the order of the file.
                texts[page] = None
        documents[kind] = list(texts)
        Random(kind).shuffle(documents[kind])
    return documents


def held_out_texts(documents: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the held-out clean text of every kind, which no page has."""
    return {kind: texts[:HELD_OUT] for kind, texts in documents.items()}


def make_pages(
    world: str, documents: dict[str, list[str]], tokens: int, count: Callable[[str], int]
) -> list[str]:
    """Return the pages of a world, as many as fill a run.

    Args:
        world: one of `WORLDS`, or `reference`.
        documents: by kind, as `read_documents` returns them.
        tokens: the tokens of a run.
        count: a function that counts the student's tokens of a text.
    """
    rng = Random(world)
    start = REFERENCE_START if world == "reference" else HELD_OUT
    queues = {kind: iter(texts[start:]) for kind, texts in documents.items()}
    # Wrong solutions come from the end of the list, which no page reaches.
    others = {kind: iter(reversed(documents[kind])) for kind in PROBLEMS}
    codes = iter(source_code())
    pages: list[str] = []
    total = 0
    while total < tokens:
        kind = TURNS[len(pages) % len(TURNS)]
        page = next(queues[kind])
        if world == "noisy" and kind in PROBLEMS and rng.random() < WRONG_SHARE:
            page = with_solution_of(page, next(others[kind]), PROBLEMS[kind][1])
        # Two of every four pages are clean. Four and nine have no common factor, so this holds for
        # every kind.
        if world == "mixed" and len(pages) % 4 == 1:
            page = next(codes)
        if world == "mixed" and len(pages) % 4 == 3:
            page = between_boilerplate(page, rng)
        pages.append(page)
        total += count(page) + 1  # the token that ends the document
    return pages


def with_solution_of(problem: str, other: str, separator: str) -> str:
    """Return a problem with the solution of another one."""
    question = problem.split(separator, 1)[0]
    solution = other.split(separator, 1)[1]
    return f"{question}{separator}{solution}"


def between_boilerplate(text: str, rng: Random) -> str:
    """Insert boilerplate of web pages before 40 % of the words."""
    return " ".join(piece for piece, _ in insert(text, rng))[:PAGE_CHARACTERS]


def source_code() -> Sequence[str]:
    """Return Python's standard library in pieces of 40 lines, in a fixed random order."""
    pieces = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*/*.py")):
        if path.parent.name in ("site-packages", "test", "idlelib"):
            continue
        lines = path.read_text(encoding="utf-8", errors="ignore").splitlines()
        for start in range(0, len(lines), 40):
            piece = "\n".join(lines[start : start + 40]).strip()
            if len(piece) > 400:
                pieces.append(piece[:PAGE_CHARACTERS])
    Random("code").shuffle(pieces)
    return pieces
