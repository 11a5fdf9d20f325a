"""Grade the published harness's cases, and count those on which we differ.

7,295 stored outputs with the harness's prediction and verdict, of all nine benchmarks: a case
differs where either does. Two minutes on two cores. The cases are not part of the repository:
`--set cases=FILE.jsonl.gz` names them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.experiments.grading import grade_cases, read_cases
from benchmarks.harness import Claim, Measured, Skipped
from vocagnolm.evaluation.grading.grading import Grader

CLAIM = Claim("predictions and verdicts are those of the harness", at_most=0, unit="cases differ")
CASES = Path(__file__).resolve().parents[3] / "shared/data/grading/cases.jsonl.gz"


@dataclass(frozen=True)
class Size:
    """Cases, each `every` of them, and worker processes (0: one per core, at most 8)."""

    cases: str = str(CASES)
    every: int = 1
    workers: int = 0


FULL, SMALL, TINY = Size(), Size(every=10), Size(every=200, workers=1)


def measure(size: Size) -> Measured:
    """Return the number of cases that differ.

    Raises:
        Skipped: the cases are not there.
    """
    path = Path(size.cases)
    if not path.exists():
        raise Skipped("it needs the harness's cases: --set cases=FILE.jsonl.gz")
    with Grader(size.workers or None) as grader:
        graded = list(grade_cases(grader, read_cases(path)[:: size.every]))
    differ = [
        case["id"]
        for case, verdict in graded
        if (verdict.prediction, verdict.correct) != (case["prediction"], case["correct"])
    ]
    details = (f"{len(graded)} cases", *(f"differs: {name}" for name in differ))
    return Measured(float(len(differ)), details)
