"""Stored teachers as `TeacherReaders` of the alignment: what they read, and their losses of it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens, read_tokens
from vocagnolm.chat.render import Template
from vocagnolm.conventions import Spans
from vocagnolm.cutting import EMPTY
from vocagnolm.data import MISSING
from vocagnolm.readers import (
    Cuts,
    Reader,
    TeacherReaders,
    whose_template,
)
from vocagnolm.spans import Tokens
from vocagnolm.store.format import LossArray, Store, StoredSegment


def spans_and_losses(segments: Sequence[StoredSegment]) -> tuple[Spans, LossArray]:
    """Join the spans [N, 2] and the losses [N] of segments of a document."""
    spans = np.concatenate([np.empty((0, 2), np.int64), *(one.spans for one in segments)])
    return spans, np.concatenate([np.empty(0, np.float32), *(one.losses for one in segments)])


class StoredReader(TeacherReaders):
    """One or several stores of the same corpus, a teacher each.

    With `first` they are one teacher: of a document the first store that has it. A document that
    lacks losses is missing, or with `plain` has no teacher.
    """

    def __init__(self, stores: Sequence[Store], *, first: bool = False, plain: bool = False):
        super().__init__()
        self.stores, self.first, self.plain = stores, first, plain

    def limits(self) -> list[int]:
        """Return the most tokens each teacher was shown at once, its start token counted."""
        contexts = [int(store.manifest["context"]) for store in self.stores]
        return [min(contexts)] if self.first else contexts

    def fingerprint(self) -> str:
        """Return all that decides what is read here."""
        how = [name for name in ("first", "plain") if getattr(self, name)]
        return "|".join([*(store.fingerprint() for store in self.stores), *how])

    def describe(self) -> list[str]:
        """Name each store, its teacher and its size."""
        return [
            f"{store.directory}: losses of {store.manifest['teacher']}, "
            f"{store.manifest['tokens']:,} tokens"
            for store in self.stores
        ]

    def read(self, texts: Sequence[str]) -> tuple[list[Tokens], Cuts]:
        """Return the stored tokens of documents, to be cut where the first one's segments begin."""
        cuts: dict[int, list[int] | None] = {}
        found = []
        for number, text in enumerate(texts):
            having = (store.segments(text) or [] for store in self.stores)
            stored = [next(filter(None, having), [])] if self.first else [*having]
            if not all(stored):
                cuts[number], stored = [] if self.plain else None, [[] for _ in stored]
            elif len(stored[0]) > 1:
                cuts[number] = [segment.start for segment in stored[0][1:]]
            found.append([spans_and_losses(segments) for segments in stored])
        teachers = []
        for documents in zip(*found, strict=True):
            spans, losses = zip(*documents, strict=True)
            teachers.append(Tokens.join(losses, spans, "float32"))
        return teachers, cuts

    def check_templates(self, *more_readers: Reader) -> None:
        """Raise a ValueError where a store is of documents, or others have no template."""
        for store in self.stores:
            if "chat_template" not in store.manifest:
                raise ValueError(
                    f"{store.directory} holds losses of documents, and --dataset conversations: "
                    "score them with vocagnolm score"
                )
        super().check_templates(*more_readers)

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[list[TurnTokens | str]]:
        """Return the stored tokens of conversations, found by their rendered text."""
        found = [
            [_stored_turns(store, one, train_on) for one in conversations] for store in self.stores
        ]
        if self.first:
            by_store = zip(*found, strict=True)
            found = [[next((x for x in reads if x != MISSING), MISSING) for reads in by_store]]
        for number, one in enumerate(conversations if self.plain else ()):
            if any(reads[number] == MISSING for reads in found):
                for reads in found:
                    reads[number] = _no_turns(one)
        return found


def _no_turns(conversation: Conversation) -> TurnTokens:
    """Return no tokens of a conversation."""
    none, stops = np.empty((0, 2), np.int64), dict.fromkeys(range(len(conversation.roles)), 0)
    return TurnTokens(math.nan, np.empty(0, np.float32), none, none, stops, 0)


def _stored_turns(store: Store, conversation: Conversation, train_on: TrainOn) -> TurnTokens | str:
    rendered = Template.of_json(store.manifest).render(conversation)
    if isinstance(rendered, str):
        return whose_template(rendered, "teacher")
    segments = store.segments(rendered.text)
    if segments is None:
        return MISSING
    spans, losses = spans_and_losses(segments)
    if not len(losses):
        return EMPTY
    found = read_tokens(conversation, rendered, losses, spans, None, train_on)
    # Stored is 0, for the token that nothing predicts.
    return found if isinstance(found, str) else replace(found, first=math.nan)
