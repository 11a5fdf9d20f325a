"""From graded items to the numbers of Table 1, as the harness rounds them, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import evaluate
import numpy as np

from vocagnolm.evaluation.grading.extraction import NO_LETTER
from vocagnolm.evaluation.grading.grading import Grader, Verdict
from vocagnolm.evaluation.grading.normalization import strip_string
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS

Z_95 = 1.959963984540054  # of the standard normal distribution


@dataclass(frozen=True)
class Accuracy:
    """Right answers among so many, in percent.

    Attributes:
        rounded: as the harness reports it, to one decimal, halves to the even digit.
        exact: without rounding.
        interval: Wilson's 95 % interval.
    """

    n: int
    correct: int
    rounded: float
    exact: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, correct: int, n: int) -> Accuracy:
        """The accuracy of `correct` right answers of `n`, which is at least 1.

        >>> Accuracy.of(10, 32).rounded
        31.2
        """
        exact = correct / n * 100
        return cls(n, correct, float(np.round(exact, 1)), exact, wilson_interval(correct, n))


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """The 95 % score interval of a share, in percent (Wilson, 1927)."""
    share = correct / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    scale = 100 / (1 + Z_95**2 / n)
    low, high = (centre - spread) * scale, (centre + spread) * scale
    return low if correct else 0.0, high if correct < n else 100.0  # exactly, at the ends


def average(columns: Sequence[Accuracy]) -> dict[str, Any]:
    """The plain mean of columns: of the rounded ones, as published, and of the exact ones.

    The interval is that of the exact mean. It puts the columns' intervals together side by side
    (MOVER; Zou and Donner, 2008), so it stays right for columns near 0 and for few items.
    """
    k = len(columns)
    exact = sum(column.exact for column in columns) / k
    below = math.sqrt(sum((column.exact - column.interval[0]) ** 2 for column in columns)) / k
    above = math.sqrt(sum((column.interval[1] - column.exact) ** 2 for column in columns)) / k
    rounded = sum(column.rounded for column in columns) / k
    return {
        "rounded": float(f"{rounded:.1f}"),  # as the harness prints it
        "exact": exact,
        "interval": [exact - below, exact + above],
    }


def summarize(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the graded items of one benchmark say.

    Args:
        records: at least one, each with the fields of `Verdict`, and of a completion where it has
            been generated here.
    """
    accuracy = Accuracy.of(sum(record["correct"] for record in records), len(records))
    unanswered = sum(record["prediction"] in (None, "", NO_LETTER) for record in records)
    summary = asdict(accuracy) | {
        "unanswered": unanswered / len(records),
        "decided_by": _count(record["decided_by"] for record in records),
        "math_verify": _second_opinion(records),
    }
    if all("finish_reason" in record for record in records):
        summary["finish_reasons"] = _count(record["finish_reason"] for record in records)
        summary["mean_new_tokens"] = sum(r["n_new_tokens"] for r in records) / len(records)
    return summary


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _second_opinion(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """math-verify's accuracy on all items; no opinion in time is wrong. None for letters."""
    judged = [record for record in records if record["math_verify"] is not None]
    if not judged:
        return None
    accuracy = Accuracy.of(sum(record["math_verify"] for record in judged), len(records))
    agreed = sum(record["math_verify"] == record["correct"] for record in judged)
    missing = len(records) - len(judged)
    return asdict(accuracy) | {"agreement": agreed / len(judged), "without_opinion": missing}


def averages(columns: Mapping[str, Accuracy]) -> dict[str, dict[str, Any]]:
    """Those of the three averages whose benchmarks are all there."""
    return {
        name: average([columns[benchmark] for benchmark in members])
        for name, members in AVERAGES.items()
        if all(benchmark in columns for benchmark in members)
    }


class MathAnswerAccuracy(evaluate.Metric):  # type: ignore[misc]
    """The harness's accuracy on model outputs, as a local metric of `evaluate`.

        metric = MathAnswerAccuracy("gsm8k")
        metric.compute(predictions=outputs, references=golds)    # {"accuracy": 36.2, ...}

    Args:
        config_name: id of a benchmark, which says how answers are found in outputs.
    """

    def _info(self) -> Any:
        if self.config_name not in BENCHMARKS:
            raise ValueError(
                f"expected a benchmark of {', '.join(BENCHMARKS)}, found {self.config_name!r}: "
                'give one as in MathAnswerAccuracy("gsm8k")'
            )
        return evaluate.MetricInfo(
            description="Accuracy of answers in model outputs, verdict for verdict that of "
            "ZubinGou/math-evaluation-harness at db77bc6.",
            citation="",
            inputs_description="predictions: model outputs; references: parsed golds.",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
        """`accuracy` (rounded, in percent), `math_verify`'s, and all else of `summarize`."""
        kind = BENCHMARKS[self.config_name].answer_kind
        with Grader() as grader:
            golds = map(strip_string, references)
            pairs = zip(predictions, golds, strict=True)
            verdicts: list[Verdict] = list(grader.grade(kind, pairs))
        summary = summarize([asdict(verdict) for verdict in verdicts])
        return {"accuracy": summary.pop("rounded"), **summary}
