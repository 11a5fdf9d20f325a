"""How stored teachers read a document: what `data.Reader` is for a teacher that is at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vocagnolm.spans import Spans
from vocagnolm.store.store import LossArray, Store

MISSING = "not in the teacher-loss store, or another text there"


@dataclass(frozen=True)
class TeacherTokens:
    """Tokens of one teacher in a run of characters.

    Attributes:
        spans: [N, 2], in characters of the run.
        losses: [N] float32, nats.
    """

    spans: Spans
    losses: LossArray


@dataclass(frozen=True)
class StoredDocument:
    """What the stored teachers think of one document.

    Attributes:
        cuts: where the first teacher's segments begin; 0 for a document that it read as a whole.
        teachers: all tokens of each.
    """

    cuts: tuple[int, ...]
    teachers: tuple[TeacherTokens, ...]

    def between(self, start: int, end: int) -> list[TeacherTokens]:
        """Each teacher's tokens in a run of characters; one that a cut goes through is in both."""
        return [_between(tokens, start, end) for tokens in self.teachers]


@dataclass(frozen=True)
class StoredReader:
    """One or several stores, as one teacher's side of the alignment.

    Attributes:
        stores: of the same corpus.
    """

    stores: Sequence[Store]

    def limits(self) -> list[int]:
        """The most tokens each teacher was shown at once, its start token counted."""
        return [int(store.manifest["context"]) for store in self.stores]

    def fingerprint(self) -> str:
        """Everything that decides what is read here."""
        return "|".join(store.fingerprint() for store in self.stores)

    def read(self, text: str) -> StoredDocument | None:
        """A document; None if it is not in all stores.

        Raises:
            ValueError: a loss is not finite; a NaN would pass for a token without a loss.
        """
        found = [store.segments(text) for store in self.stores]
        if None in found:
            return None
        documents = [segments for segments in found if segments]
        for store, segments in zip(self.stores, documents, strict=True):
            if not all(np.isfinite(segment.losses).all() for segment in segments):
                raise ValueError(
                    f"the teacher-loss store {store.directory} has losses that are not finite, in "
                    f"the document that begins {text[:60]!r}: score the corpus again"
                )
        cuts = tuple(segment.start for segment in documents[0])
        teachers = (
            TeacherTokens(
                np.concatenate([segment.spans for segment in segments]),
                np.concatenate([segment.losses for segment in segments]),
            )
            for segments in documents
        )
        return StoredDocument(cuts, tuple(teachers))


def _between(tokens: TeacherTokens, start: int, end: int) -> TeacherTokens:
    first = int(np.searchsorted(tokens.spans[:, 1], start, side="right"))
    last = int(np.searchsorted(tokens.spans[:, 0], end, side="left"))
    spans = np.clip(tokens.spans[first:last], start, end) - start
    return TeacherTokens(spans, tokens.losses[first:last])
