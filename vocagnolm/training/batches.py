"""Whether the collator, the models and the arguments of a run suit its packed sequences."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from vocagnolm.collator import PackedCollator
from vocagnolm.fields import OptionError
from vocagnolm.method import Method
from vocagnolm.models.load import context_length
from vocagnolm.packing import Blocks
from vocagnolm.training.config import VocAgnoConfig


def make_collator(
    method: Method, args: VocAgnoConfig, dataset: Any, collator: PackedCollator | None
) -> PackedCollator:
    """Return the user's collator if it suits the method, or else one for the packed sequences."""
    chunks = method.chunks if method.method == "chunk" else None
    crosses = args.attend_across_documents
    if isinstance(dataset, Blocks) and args.max_length != dataset.max_length:
        raise ValueError(
            f"train_dataset has sequences of {dataset.max_length} tokens: set args.max_length to it"
        )
    if collator is None and isinstance(dataset, Blocks):
        return PackedCollator(
            dataset.max_length,
            attend_across_documents=crosses,
            teacher_max_length=dataset.teacher_max_length,
            chunks=chunks,
            shares=method.aggregation_in_effect == "share",
        )
    if collator is None:
        if dataset is None:
            raise ValueError("train_dataset is missing: give documents")
        raise ValueError(_not_packed("train_dataset", dataset))
    if not isinstance(collator, PackedCollator):
        raise ValueError(f"data_collator must be a PackedCollator, got {str(collator)[:99]}")
    expected: dict[str, object] = {"chunks": chunks}
    if isinstance(dataset, Blocks):
        expected |= {"max_length": args.max_length, "attend_across_documents": crosses}
    for name, value in expected.items():
        if getattr(collator, name) != value:
            raise ValueError(f"data_collator must be PackedCollator(..., {name}={value})")
    method.check_chunks(collator.max_length)
    return collator


def check_packed(data: Any, collator: Callable[[list[Any]], Any], argument: str) -> None:
    """Collate one item of a dataset, or of each in a dict, if it is not Blocks.

    The first evaluation, which would fail, may come after hours of training.
    """
    for part in data.values() if isinstance(data, dict) else [data]:
        if part is None or isinstance(part, Blocks | IterableDataset):
            continue
        try:
            collator([part[0]])
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(_not_packed(argument, part)) from error


def _not_packed(argument: str, data: Any) -> str:
    return (
        f"{argument} must be documents or the Blocks of prepare_dataset, got {type(data).__name__}"
    )


def check_contexts(models: Sequence[Any], blocks: Blocks, argument: str) -> None:
    """Reject a segment with more tokens than the model that reads it was made for.

    `models` are the student and its loaded teachers. Documents are cut to fit, but the caller of
    `prepare_dataset` chooses how long the segments of Blocks may be.
    """
    lengths = blocks.longest_segments
    for index, model in enumerate(models):
        # A teacher with the student's tokens reads the student's segments.
        length = lengths[index] if index < len(lengths) else lengths[0]
        context = context_length(model.config)
        if length > context:
            role, option = ("teacher", "teacher_context") if index else ("student", "max_length")
            raise ValueError(
                f"{argument} has a segment of {length} {role} tokens, and the {role}'s context is "
                f"{context}: give prepare_dataset {option}={context}"
            )


def check_evaluation(args: VocAgnoConfig, eval_dataset: Any) -> None:
    """Raise an OptionError if no evaluation gives the metric that chooses the best model.

    Trainer would find that after the first evaluation.
    """
    metric = args.metric_for_best_model
    losses = _losses_of(eval_dataset)
    if metric is None or not losses:
        return
    # As in Trainer, the prefix may be left out.
    if metric.removeprefix("eval_") not in losses:
        raise OptionError(
            "metric_for_best_model",
            f"{metric} is not among the losses of the evaluation: give one of {', '.join(losses)}",
        )
    if args.greater_is_better:
        raise OptionError("greater_is_better", "True keeps the worst model: a lower loss is better")


def _losses_of(eval_dataset: Any) -> list[str]:
    """Return the names of the losses that an evaluation of these packed sequences gives."""
    if eval_dataset is None:
        return []
    if isinstance(eval_dataset, dict):
        losses = []
        for name, dataset in eval_dataset.items():
            losses += [f"{name}_{loss}" for loss in _losses_of(dataset)]
        return losses
    # Packed sequences of several corpora also have a loss of each.
    parts = getattr(eval_dataset, "parts", {})
    return ["loss", *(f"{name}_loss" for name in parts if len(parts) > 1)]
