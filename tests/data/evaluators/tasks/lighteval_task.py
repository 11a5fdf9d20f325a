"""A task of lighteval, over the same items. It is run in this directory."""

from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(line: dict[str, str], task_name: str) -> Doc:
    """Ask for the answer in a template of its own."""
    query = f"Question: {line['question']}"
    return Doc(task_name=task_name, query=query, choices=[f" {line['answer']}"], gold_index=0)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="sums",
        prompt_function=prompt,
        hf_repo="items",
        hf_subset="default",
        hf_avail_splits=["test"],
        evaluation_splits=["test"],
        generation_size=32,
        stop_sequence=["\n\n"],
        metrics=[Metrics.expr_gold_metric, Metrics.exact_match],
        version=1,
    )
]
