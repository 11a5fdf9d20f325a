"""The harness's accuracy as a metric of `evaluate`, an optional package.

Install it with `pip install "vocagnolm[evaluate]"`. Nothing else imports this module.
"""

from collections.abc import Sequence
from dataclasses import asdict

import datasets

from vocagnolm.evaluation.accuracy import summarize
from vocagnolm.evaluation.extraction import normalise_gold
from vocagnolm.evaluation.grading.grading import Grader
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.shell.extras import require
from vocagnolm.shell.io import JsonObject

# A missing package is reported with the command that installs it, so this comes before the import.
require("evaluate", "vocagnolm.evaluation.metric")
import evaluate  # noqa: E402


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

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> JsonObject:
        kind = BENCHMARKS[self.config_name].answer_kind
        # The references are already normalised once, and the harness does it again when it grades.
        golds = [normalise_gold(kind, reference) for reference in references]
        # The predictions are whole outputs, in which the grader finds the answers.
        with Grader() as grader:
            verdicts = list(grader.grade(kind, zip(predictions, golds, strict=True)))
        summary = summarize([asdict(verdict) for verdict in verdicts])
        return {"accuracy": summary.pop("rounded"), **summary}
