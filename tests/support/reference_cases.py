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
    """The reference's cases, their benchmarks under our names."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    for case in cases:
        case["benchmark"] = REFERENCE_IDS.get(case["benchmark"], case["benchmark"])
    return cases


def grade_cases(grader: Grader, cases: list[dict[str, Any]]) -> Iterator[tuple[Any, Verdict]]:
    """Every case with its verdict, those of one kind of answer together."""
    for kind in ("free", "letter"):
        chosen = [case for case in cases if BENCHMARKS[case["benchmark"]].answer_kind == kind]
        answers = [(case["raw_output"], case["gold"]) for case in chosen]
        yield from zip(chosen, grader.grade(kind, answers), strict=True)
