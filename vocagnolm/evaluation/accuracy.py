"""From graded items to the numbers of Table 1, as the harness rounds them, with intervals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

import datasets
import evaluate
import numpy as np

from vocagnolm.evaluation.extraction import NO_LETTER
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.normalization import strip_string
from vocagnolm.evaluation.records import Record
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS

Z_95 = 1.959963984540054


def accuracy(correct: int, n: int) -> Record:
    """Give right answers among at least one in percent, with their interval.

    `rounded` is what the harness reports: one decimal, halves to the even digit.

    >>> accuracy(10, 32)["rounded"]
    31.2
    """
    exact = correct / n * 100
    interval = list(wilson_interval(correct, n))
    rounded = float(np.round(exact, 1))
    return {"n": n, "correct": correct, "rounded": rounded, "exact": exact, "interval": interval}


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Give the 95 % score interval of a share, in percent (Wilson, 1927)."""
    share = correct / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    scale = 100 / (1 + Z_95**2 / n)
    low, high = (centre - spread) * scale, (centre + spread) * scale
    return low if correct else 0.0, high if correct < n else 100.0


def average(columns: Sequence[Record]) -> Record:
    """Average the rounded columns, as published, and the exact ones, with an interval."""
    k = len(columns)
    exact = sum(column["exact"] for column in columns) / k
    # The columns' intervals put together side by side (MOVER; Zou and Donner, 2008), which stays
    # right for columns near 0 and for few items.
    below = math.sqrt(sum((column["exact"] - column["interval"][0]) ** 2 for column in columns)) / k
    above = math.sqrt(sum((column["interval"][1] - column["exact"]) ** 2 for column in columns)) / k
    # As the harness prints it.
    rounded = float(f"{sum(column['rounded'] for column in columns) / k:.1f}")
    return {"rounded": rounded, "exact": exact, "interval": [exact - below, exact + above]}


def averages(columns: Mapping[str, Record]) -> dict[str, Record]:
    """Compute those of the three averages whose benchmarks are all there."""
    return {
        name: average([columns[benchmark] for benchmark in members])
        for name, members in AVERAGES.items()
        if columns.keys() >= set(members)
    }


def summarize(records: Sequence[Record]) -> Record:
    """Sum up the items of one benchmark: verdicts, and completions that were generated here."""
    unanswered = sum(record["prediction"] in (None, "", NO_LETTER) for record in records)
    summary = accuracy(sum(record["correct"] for record in records), len(records)) | {
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


def _second_opinion(records: Sequence[Record]) -> Record | None:
    # Of all items: no opinion in time is wrong. None for letters.
    judged = [record for record in records if record["math_verify"] is not None]
    if not judged:
        return None
    agreed = sum(record["math_verify"] == record["correct"] for record in judged)
    return accuracy(sum(record["math_verify"] for record in judged), len(records)) | {
        "agreement": agreed / len(judged),
        "without_opinion": len(records) - len(judged),
    }


class MathAnswerAccuracy(evaluate.Metric):  # type: ignore[misc]
    """The harness's accuracy on model outputs, as a local metric of `evaluate`.

    metric = MathAnswerAccuracy("gsm8k")    # whose rules find the answers in outputs
    metric.compute(predictions=outputs, references=golds)    # {"accuracy": 36.2, ...}
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Accuracy of answers, verdict for verdict that of the harness at db77bc6.",
            citation="",
            inputs_description="predictions: model outputs; references: parsed golds.",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> Record:
        pairs = zip(predictions, map(strip_string, references), strict=True)
        with Grader() as grader:
            verdicts = list(grader.grade(BENCHMARKS[self.config_name].answer_kind, pairs))
        summary = summarize([asdict(verdict) for verdict in verdicts])
        return {"accuracy": summary.pop("rounded"), **summary}
