"""Stored teachers as a `Guide` of the alignment: what they read, and their losses of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vocagnolm.spans import Tokens
from vocagnolm.store.store import Store, StoredSegment
from vocagnolm.tokenizers import Guide, Reader, TeacherTokens


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
        found: list[list[list[StoredSegment]]] = []
        for number, text in enumerate(texts):
            stored = [store.segments(text) for store in self.stores]
            found.append([segments or [] for segments in stored])
            if not all(stored):
                cuts[number], found[-1] = None, [[] for _ in stored]
            elif len(found[-1][0]) > 1:
                cuts[number] = [segment.start for segment in found[-1][0][1:]]
        none = np.empty((0, 2), np.int64)
        teachers = [
            Tokens.join(
                [np.concatenate([[], *(one.losses for one in segments)]) for segments in documents],
                [
                    np.concatenate([none, *(one.spans for one in segments)])
                    for segments in documents
                ],
                "float32",
            )
            for documents in zip(*found, strict=True)
        ]
        return TeacherTokens(teachers, cuts)
