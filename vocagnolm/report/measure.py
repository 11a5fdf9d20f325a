"""Measure the losses of a text's tokens, and which of them are kept, without a training step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import datasets
import torch
from accelerate.utils import send_to_device
from torch import nn

from vocagnolm.chat.reading import TrainOn
from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.data import align_corpus
from vocagnolm.guidance import TokenGuidance
from vocagnolm.method import Method
from vocagnolm.objective import Objective, OnlineTeacher
from vocagnolm.packing import Batch, PackedCollator, as_block, student_segments
from vocagnolm.readers import Reader
from vocagnolm.report.view import TextView, read_segment, view_rows


@dataclass(frozen=True)
class LoadedPair:
    """Both models, ready to score, and how they read."""

    student: nn.Module
    student_reader: Reader
    teacher: OnlineTeacher
    teacher_reader: Reader
    device: torch.device


def view_documents(
    corpus: datasets.Dataset,
    pair: LoadedPair,
    method: Method,
    indices: Sequence[int] | None = None,
    train_on: TrainOn = "completions",
) -> list[TextView]:
    """Show all segments of some documents, by their indices; each is a sequence of its own."""
    readers = pair.student_reader, pair.teacher_reader
    segments = align_corpus(corpus, *readers, train_on=train_on)
    shown = range(len(corpus)) if indices is None else indices
    for place, reason in segments.skipped:
        message = f"document {shown[place]} cannot be shown: {reason}"
        if not len(segments.rows):
            raise ValueError(f"{message}; give another text")
        logging.getLogger(__name__).warning(message)
    arrays = segments.rows.with_format("numpy")
    views: list[TextView] = []
    for place, row in enumerate(segments.rows):
        collate = PackedCollator(
            row["student_tokens"],
            teacher_max_length=pair.teacher_reader.limit,
            shares=method.aggregation == "share",
        )
        block = as_block(place, arrays[place : place + 1])
        batch = cast(Batch, send_to_device(collate([block]), pair.device))
        segment = read_segment(row, corpus, pair.student_reader)
        segment = replace(segment, document=shown[segment.document])
        views += view_rows(batch, measure(batch, pair, method), [[segment]])
    return views


@torch.no_grad()
def measure(batch: Batch, pair: LoadedPair, method: Method) -> TokenGuidance:
    """Decide over the tokens of a batch, as in training but without a step."""
    student: Any = pair.student
    objective = Objective(method, pair.teacher)
    teacher = objective.teacher_losses(batch)
    assert teacher is not None, f"{method.as_typed} asks no teacher"
    loss_BS = student(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        labels=batch["labels"],
        segments=student_segments(batch),
        token_losses=True,
    )
    for role, losses in (("student", loss_BS), ("teacher", teacher.loss_BT)):
        if not losses.isfinite().all():
            raise NonFiniteLoss(f"the {role}'s losses are NaN or infinite on this text")
    return objective.select(loss_BS, batch, teacher)
