"""The parts of a trainer. Needs no `datasets`, which a machine for timings may lack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import SaveStrategy, SchedulerType

from vocagnolm.packing import Blocks
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.settings import Job, settings_of

if TYPE_CHECKING:
    from vocagnolm.training.documents import Documents
    from vocagnolm.training.models import Models


@dataclass(frozen=True)
class Assembled:
    """The parts of a trainer, before the weights of its models are loaded.

    Attributes:
        models: None where loaded models and packed sequences were given, which need no tokenizer.
        documents: of the corpora that the job names; None in Python.
        train_dataset, eval_dataset: packed sequences; of several evaluations a dict by name.
        processing_class: the student's tokenizer.
        settings: of the run.
        skipped: the documents that were left out, with the reasons, by the file that lists them.
    """

    job: Job
    models: Models | None
    documents: Documents | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    settings: dict[str, Any]
    skipped: dict[str, list[tuple[int, str]]]


def assembled_of_loaded(
    job: Job, train_dataset: Any, eval_dataset: Any, processing_class: Any
) -> Assembled:
    """Return the parts of a trainer with loaded models and packed sequences."""
    return Assembled(
        job=job,
        models=None,
        documents=None,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=processing_class,
        settings=settings_of(job)
        | settings_of_blocks(train_dataset)
        | settings_of_evaluation(job.args, eval_dataset),
        skipped={},
    )


def settings_of_blocks(dataset: Any) -> dict[str, Any]:
    """Return what packed sequences add to a run's settings, because progress is counted in them."""
    # Other packed sequences, such as a list, have no digest. The user answers for their order.
    if not isinstance(dataset, Blocks):
        return {}
    return {"blocks": len(dataset), "corpus_digest": dataset.corpus_digest}


def settings_of_evaluation(args: VocAgnoConfig, eval_dataset: Any) -> dict[str, Any]:
    """Return what an evaluation adds to a run's settings, if its losses steer the run.

    A resumed run compares its losses with those before.
    """
    steers = (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    )
    if not steers:
        return {}
    parts = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    digests = {name: getattr(part, "corpus_digest", None) for name, part in parts.items()}
    return {"evaluation": {"metric": args.metric_for_best_model, "documents": digests}}
