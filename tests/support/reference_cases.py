"""The published harness's stored outputs, with its predictions and verdicts."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.grading.grading import Grader, Verdict
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS

REFERENCE_IDS = {"minerva_math": "math", "sat_math": "sat"}


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Read the reference's cases, with our names for benchmarks."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        case["benchmark"] = REFERENCE_IDS.get(case["benchmark"], case["benchmark"])
    return cases


def grade_cases(grader: Grader, cases: list[dict[str, Any]]) -> Iterator[tuple[Any, Verdict]]:
    """Yield every case with its verdict, grouped by kind of answer."""
    for kind in ("free", "letter"):
        chosen = [case for case in cases if BENCHMARKS[case["benchmark"]].answer_kind == kind]
        answers = [(case["raw_output"], case["gold"]) for case in chosen]
        yield from zip(chosen, grader.grade(kind, answers), strict=True)


def read_table(table: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the rule and the parts of each case of a table.

    A line is `rule :: part → part | part → part`, and a line that follows has more cases of the
    same rule. "⏎" is a new line.
    """
    rule = ""
    for line in table.strip().splitlines():
        name, separator, cases = line.partition(" :: ")
        if not separator:
            name, cases = rule, line.strip().removeprefix("|")
        rule = name
        for case in cases.replace("⏎", "\n").split(" | "):
            yield rule, [part.strip(" ") for part in case.split("→")]
