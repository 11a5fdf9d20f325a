"""Results of an evaluation in the card of the model, where the hub looks for them."""

import re
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard

from vocagnolm.evaluation.records import Record
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS
from vocagnolm.io import write_text

# Of the paper's protocol, and of the other one, which stands beside it.
_HEADINGS = {False: "## Evaluation\n", True: "## Evaluation, zero-shot chat\n"}


def add_to_card(results: Record, table: str) -> None:
    """Put results into the card of a model of ours, in place of earlier ones; others have none."""
    path = Path(results["model"]["name"]) / "README.md"
    if not path.is_file():
        return
    card = ModelCard.load(path, ignore_metadata_errors=True)
    if "vocagnolm" not in (card.data.tags or ()):
        return
    columns = results["benchmarks"]
    is_chat = any("chat" in column["marked"] for column in columns.values())
    earlier = [each for each in card.data.eval_results or [] if _is_chat(each) != is_chat]
    whole = {name: column for name, column in columns.items() if not column["partial"]}
    if whole:
        card.data.eval_results = [_result(*column) for column in whole.items()] + earlier
        card.data.model_name = card.data.model_name or path.parent.name
    heading = _HEADINGS[is_chat]
    sections = re.split(rf"\n(?={'|'.join(_HEADINGS.values())})", card.text)
    kept = [text.rstrip() for text in sections if not text.startswith(heading)]
    card.text = "\n\n".join([*kept, f"{heading}\n{table}"])
    write_text(path, str(card))


def _is_chat(result: EvalResult) -> bool:
    return "zero-shot" in str(result.metric_name)


def _result(name: str, column: Record) -> EvalResult:
    shots = "zero-shot" if "chat" in column["marked"] else "few-shot"
    return EvalResult(
        task_type="text-generation",
        dataset_type=BENCHMARKS[name].hub or name,
        dataset_name=column["column"],
        metric_type="accuracy",
        # Marks say why a number may not stand beside published ones.
        metric_name="; ".join([f"accuracy, {shots} chain of thought", *column["marks"]]),
        metric_value=column["rounded"],
    )
