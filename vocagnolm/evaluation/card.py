"""Results of an evaluation in the card of the model, where the hub looks for them."""

from pathlib import Path

from huggingface_hub import EvalResult, ModelCard

from vocagnolm.evaluation.records import Record
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.host.cards import TAGS

_HEADING = "\n## Evaluation\n"


def add_to_card(results: Record, table: str) -> None:
    """Put results into the card of a model of ours, in place of earlier ones; others have none."""
    path = Path(results["model"]["name"]) / "README.md"
    if not path.is_file():
        return
    card = ModelCard.load(path, ignore_metadata_errors=True)
    if not {*TAGS} <= {*(card.data.tags or ())}:
        return
    found = [
        _result(name, column)
        for name, column in results["benchmarks"].items()
        if not column["partial"]
    ]
    if found:
        card.data.eval_results = found
        card.data.model_name = card.data.model_name or path.parent.name
    card.text = card.text.partition(_HEADING)[0].rstrip() + f"\n{_HEADING}\n{table}"
    card.save(path)


def _result(name: str, column: Record) -> EvalResult:
    hub = BENCHMARKS[name].hub
    return EvalResult(
        task_type="text-generation",
        dataset_type=hub.name if hub else name,
        dataset_name=column["column"],
        metric_type="accuracy",
        # Marks say why a number may not stand beside published ones.
        metric_name="; ".join(["accuracy, few-shot chain of thought", *column["marks"]]),
        metric_value=column["rounded"],
    )
