"""Stored teachers as a `Guide` of the alignment: what they read, and their losses of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from vocagnolm.spans import Spans
from vocagnolm.store.store import LossArray, Store
from vocagnolm.tokenizers import Guide, Piece, Reader, TeacherTokens


@dataclass(frozen=True)
class StoredTokens:
    """N tokens of one teacher: spans [N, 2] in characters of a run, and losses, float32 [N]."""

    spans: Spans
    losses: LossArray


@dataclass(frozen=True)
class StoredDocument:
    """All tokens of one document that each of the stored teachers read.

    `cuts` are the starts of the first one's segments: 0 if it read the document as a whole.
    """

    cuts: tuple[int, ...]
    teachers: tuple[StoredTokens, ...]

    def between(self, start: int, end: int) -> list[StoredTokens]:
        """Each teacher's tokens in a run of characters; one that a cut goes through is in both."""
        return [_between(tokens, start, end) for tokens in self.teachers]


@dataclass(frozen=True)
class StoredPiece(Piece):
    """A piece with what is stored of its whole document, so that a part of it is not read again."""

    stored: StoredDocument

    def read(self) -> list[TeacherTokens]:
        """Return each teacher's tokens; the start token, whose loss is not known, comes first."""
        return [
            TeacherTokens(tokens.spans, losses=[math.nan, *tokens.losses.tolist()])
            for tokens in self.stored.between(self.start, self.end)
        ]


@dataclass(frozen=True)
class StoredReader(Guide):
    """One or several stores of the same corpus."""

    stores: Sequence[Store]
    # No teacher is co-resident, and tokens are mapped by characters.
    readers: tuple[Reader, ...] = field(default=(), init=False)
    by_position: bool = field(default=False, init=False)

    def limits(self) -> list[int]:
        """Return the most tokens each teacher was shown at once, its start token counted."""
        return [int(store.manifest["context"]) for store in self.stores]

    def fingerprint(self) -> str:
        """Return all that decides what is read here."""
        return "|".join(store.fingerprint() for store in self.stores)

    def check(self) -> None:
        """Verify the checksums of all stores."""
        for store in self.stores:
            store.check()

    def describe(self) -> list[str]:
        """Name each store, its teacher and its size."""
        return [
            f"{store.directory}: losses of {store.manifest['teacher']}, "
            f"{store.manifest['tokens']:,} tokens"
            for store in self.stores
        ]

    def pieces(self, document: int, text: str) -> Sequence[Piece]:
        """Cut a document where the first teacher's segments begin; nothing if a store lacks it."""
        stored = self.open(text)
        if stored is None:
            return []
        return [
            StoredPiece(document, start, text[start:end], end == len(text), stored)
            for start, end in pairwise([*stored.cuts, len(text)])
        ]

    def read(self, pieces: Sequence[Piece]) -> list[list[TeacherTokens]]:
        """Return the stored tokens of every piece that `pieces` made, or of a part of it."""
        return [piece.read() for piece in pieces if isinstance(piece, StoredPiece)]

    def open(self, text: str) -> StoredDocument | None:
        """Read a document; None if it is not in all stores."""
        found = [store.segments(text) for store in self.stores]
        if None in found:
            return None
        documents = [segments for segments in found if segments]
        cuts = tuple(segment.start for segment in documents[0])
        teachers = (
            StoredTokens(
                np.concatenate([segment.spans for segment in segments]),
                np.concatenate([segment.losses for segment in segments]),
            )
            for segments in documents
        )
        return StoredDocument(cuts, tuple(teachers))


def _between(tokens: StoredTokens, start: int, end: int) -> StoredTokens:
    first = int(np.searchsorted(tokens.spans[:, 1], start, side="right"))
    last = int(np.searchsorted(tokens.spans[:, 0], end, side="left"))
    spans = np.clip(tokens.spans[first:last], start, end) - start
    return StoredTokens(spans, tokens.losses[first:last])
