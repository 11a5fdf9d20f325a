"""Stored teachers as a `Guide` of the alignment: what they read, and their losses of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vocagnolm.spans import NO_SPANS
from vocagnolm.store.store import Store, StoredSegment
from vocagnolm.tokenizers import Guide, Reader, TeacherTokens, Tokens


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

    def read(self, texts: Sequence[str]) -> TeacherTokens:
        """Return the stored tokens of documents, to be cut where the first one's segments begin."""
        cuts: dict[int, list[int] | None] = {}
        found: list[list[list[StoredSegment]]] = [[] for _ in self.stores]
        for number, text in enumerate(texts):
            stored = [store.segments(text) for store in self.stores]
            if None in stored:
                cuts[number] = None
            elif stored[0] and len(stored[0]) > 1:
                cuts[number] = [segment.start for segment in stored[0][1:]]
            for mine, segments in zip(found, stored, strict=True):
                mine.append([] if cuts.get(number, ()) is None else segments or [])
        teachers = [
            Tokens.join(
                [np.concatenate([[], *(one.losses for one in segments)]) for segments in documents],
                [
                    np.concatenate([NO_SPANS, *(one.spans for one in segments)])
                    for segments in documents
                ],
            )
            for documents in found
        ]
        return TeacherTokens(teachers, cuts)
