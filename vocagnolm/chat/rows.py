"""What every model reads of conversations, fitted into all contexts and concatenated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import IntArray, TurnTokens
from vocagnolm.texts.tokens import Tokens

NOTHING = "no answer of an assistant to train on"


@dataclass(frozen=True)
class FittedTurns:
    """Conversations by index, each ended behind its last answer that fits.

    `models` have what each of them reads of every one; `skipped` the reasons why others are not
    read, `left_out` the messages that each of these lacks, `ends` their last characters.
    """

    documents: list[int]
    models: list[list[TurnTokens]]
    ends: list[int]
    left_out: list[int]
    skipped: dict[int, str]

    def tokens(self, model: int) -> Tokens:
        """Return a model's tokens; losses of those without labels are left out."""
        reads = self.models[model]
        values = [read.values if read.values.dtype.kind == "i" else _masked(read) for read in reads]
        dtype = values[0].dtype.name if values else "int32"
        laid = Tokens.join(values, [read.spans for read in reads], dtype)
        return replace(laid, start=np.array([read.first for read in reads]))

    def columns(self) -> dict[str, Any]:
        """Make the columns that only conversations have: integers, or (edges, values) of arrays."""
        reads = list(zip(*self.models, strict=True))
        trimmed = [sum(read.trimmed for read in row) for row in reads]
        return {
            "document": np.array(self.documents, np.int64),
            "left_out_messages": np.array(self.left_out, np.int64),
            "trimmed_characters": np.array(trimmed, np.int64),
            "student_labelled": _labelled([row[:1] for row in reads]),
            "teacher_labelled": _labelled([row[1:] for row in reads]),
        }


def fit_turns(
    conversations: Mapping[int, Conversation],
    models: Sequence[Sequence[TurnTokens | str]],
    limits: Sequence[int],
) -> FittedTurns:
    """Fit what the student and the teachers read into at most so many tokens of each."""
    kept: list[list[TurnTokens]] = []
    fitted = FittedTurns([], [], [], [], {})
    for (document, one), *reads in zip(conversations.items(), *models, strict=True):
        found = _fitting(one, reads, limits)
        if isinstance(found, str):
            fitted.skipped[document] = found
            continue
        fitting, last = found
        kept.append(fitting)
        fitted.documents.append(document)
        fitted.ends.append(one.ends[last])
        fitted.left_out.append(len(one.ends) - 1 - last)
    fitted.models.extend([row[model] for row in kept] for model in range(len(models)))
    return fitted


def _fitting(
    conversation: Conversation, reads: Sequence[TurnTokens | str], limits: Sequence[int]
) -> tuple[list[TurnTokens], int] | str:
    """Return what fits into all contexts with the index of the last message, or why none does."""
    found = []
    for read in reads:
        if isinstance(read, str):
            return read
        found.append(read)
    last = len(conversation.roles) - 1
    both = list(zip(found, limits, strict=True))
    if any(len(read.spans) > limit for read, limit in both):
        answers = [n for n in found[0].stops if all(read.stops[n] <= limit for read, limit in both)]
        if not answers:
            return "its first answer alone exceeds a context" if found[0].stops else NOTHING
        last = answers[-1]
        found = [read.until(last) for read in found]
    return (found, last) if np.diff(found[0].labelled).any() else NOTHING


def _masked(read: TurnTokens) -> npt.NDArray[np.float32]:
    losses = np.full(len(read.values), np.nan, np.float32)
    for first, last in read.labelled.tolist():
        losses[first:last] = read.values[first:last]
    return losses


def _labelled(rows: Sequence[Sequence[TurnTokens]]) -> tuple[IntArray, IntArray]:
    """Place the labelled ranges of models in a row, each behind the token that it begins with."""
    placed = [np.empty(0, np.int64)]
    for reads in rows:
        at, ranges = 1, np.empty((0, 2), np.int64)
        for read in reads:
            ranges = np.concatenate([ranges, read.labelled + at])
            at += len(read.spans) + 1
        kept = ranges[ranges[:, 0] < ranges[:, 1]].ravel()
        # No range would stand for all tokens: that of the first one has no label.
        placed.append(kept if len(kept) or not reads else np.array([0, 1]))
    return np.cumsum([0, *map(len, placed[1:])]), np.concatenate(placed)
