"""Stored teachers as `TeacherReaders` of the alignment: what they read, and their losses."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TRAIN_ON, TrainOn, TurnTokens, read_tokens
from vocagnolm.chat.render import Template
from vocagnolm.conventions import Spans
from vocagnolm.cutting import EMPTY
from vocagnolm.data import MISSING
from vocagnolm.readers import Reader, TeacherReaders, WithoutTeacher
from vocagnolm.record import differences
from vocagnolm.spans import Tokens
from vocagnolm.store.format import (
    LossArray,
    Store,
    StoredDocument,
    by_teacher,
    first_scored,
    teacher_of,
)

_NO_SPANS: Spans = np.empty((0, 2), np.int64)
_NO_LOSSES: LossArray = np.empty(0, np.float32)


class StoredReader(TeacherReaders):
    """Stores of one or more teachers. Each takes a document from its first store that has it.

    Stores of one teacher may have parts of a corpus. With `first`, all stores are one teacher. A
    document without losses is missing, or with `plain` has no teacher.
    """

    def __init__(self, stores: Sequence[Store], *, first: bool = False, plain: bool = False):
        super().__init__()
        self.stores, self.first, self.plain = stores, first, plain
        self._by_teacher: list[list[Store]] = []
        for numbers in by_teacher(store.manifest for store in stores):
            self._by_teacher.append([stores[number] for number in numbers])
        self.teachers = [list(stores)] if first else self._by_teacher

    def limits(self) -> list[int]:
        """Return the most tokens that each teacher read at once, including the start token."""
        # All stores of a teacher must fit its smallest context, because any of them may have the
        # document. Their contexts differ only with `first`.
        limits = []
        for stores in self.teachers:
            contexts = []
            for store in stores:
                contexts.append(int(store.manifest["context"]))
            limits.append(min(contexts))
        return limits

    def fingerprint(self) -> str:
        """Return everything that determines what is read here."""
        parts = [store.fingerprint() for store in self.stores]
        if self.first:
            parts.append("first")
        # Earlier versions read each store as a separate teacher.
        elif len(self.teachers) < len(self.stores):
            parts.append("by teacher")
        if self.plain:
            parts.append("plain")
        return "|".join(parts)

    def describe(self) -> list[str]:
        """Name each teacher, its stores and their size."""
        lines = []
        first = self._by_teacher[0][0].manifest
        for stores in self._by_teacher:
            names = []
            tokens = 0
            for store in stores:
                names.append(str(store.directory))
                tokens += store.manifest["tokens"]
            manifest = stores[0].manifest
            teacher = manifest["teacher"]
            line = f"{', '.join(names)}: losses of {teacher}, {tokens:,} tokens"
            changes = differences(teacher_of(first), teacher_of(manifest))
            if changes and teacher == first["teacher"]:
                line += f", as another teacher ({'; '.join(changes)})"
            lines.append(line)
        return lines

    def read(self, texts: Sequence[str]) -> tuple[list[Tokens], WithoutTeacher]:
        """Return the stored tokens of documents, and the documents that a store lacks."""
        without_teacher: dict[int, str | None] = {}
        # What the stores have of every text, by teacher.
        stored_texts = []
        for number, text in enumerate(texts):
            documents = self._documents(text)
            # Training needs the losses of all teachers, so if one lacks a document, it has no
            # teacher.
            if None in documents:
                without_teacher[number] = None if self.plain else MISSING
                documents = [None] * len(documents)
            stored_texts.append(documents)
        if not texts:
            return [], without_teacher
        tokens = []
        for teacher in range(len(stored_texts[0])):
            # A text without losses gets empty arrays, so that all texts keep their places.
            spans = []
            losses = []
            for documents in stored_texts:
                document = documents[teacher]
                spans.append(document.spans if document else _NO_SPANS)
                losses.append(document.losses if document else _NO_LOSSES)
            tokens.append(Tokens.join(losses, spans, "float32"))
        return tokens, without_teacher

    def _documents(self, text: str) -> list[StoredDocument | None]:
        """Return what each teacher's stores have of a document, or None."""
        documents = []
        for stores in self.teachers:
            document = first_scored(store.document(text) for store in stores)
            # The teacher could not score some documents, which are stored without losses.
            is_scored = document is not None and len(document.losses) > 0
            documents.append(document if is_scored or not self.plain else None)
        return documents

    def scored(self, content: str | Conversation) -> StoredDocument | None:
        """Return a document, or the answers of a conversation, or None if the stores lack it.

        Only for stores of one teacher. What cannot be scored has no tokens.
        """
        if isinstance(content, str):
            return first_scored(store.document(content) for store in self.stores)
        ((turns,),) = self.read_turns([content], TRAIN_ON[0])
        if isinstance(turns, str):
            return None if turns == MISSING else StoredDocument(0, _NO_SPANS, _NO_LOSSES)
        return _answers_of(content, turns)

    def check_templates(self, *more_readers: Reader) -> None:
        """Reject stores of documents, and other readers without a template."""
        for store in self.stores:
            if "chat_template" not in store.manifest:
                raise ValueError(
                    f"{store.directory} holds losses of documents, but the corpus has "
                    "conversations: score them with vocagnolm score"
                )
        super().check_templates(*more_readers)

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[list[TurnTokens | str]]:
        """Return the stored tokens of conversations, which are found by their rendered text."""
        # What each teacher's stores have of every conversation.
        reads: list[list[TurnTokens | str]] = []
        for stores in self.teachers:
            turns_of_teacher = []
            for conversation in conversations:
                turns = (_stored_turns(store, conversation, train_on) for store in stores)
                turns_of_teacher.append(_first_of(turns))
            reads.append(turns_of_teacher)
        if self.plain:
            # If one teacher lacks a conversation, it is read without a teacher, like a document.
            for number, conversation in enumerate(conversations):
                if any(teacher_reads[number] in (MISSING, EMPTY) for teacher_reads in reads):
                    for teacher_reads in reads:
                        teacher_reads[number] = _no_turns(conversation)
        return reads


def _first_of(turns: Iterable[TurnTokens | str]) -> TurnTokens | str:
    """Return the first that has losses, or else why one has none."""
    reason = MISSING
    for turn in turns:
        if turn not in (MISSING, EMPTY):
            return turn
        reason = EMPTY if turn == EMPTY else reason
    return reason


def _answers_of(conversation: Conversation, turns: TurnTokens) -> StoredDocument:
    """Join the trained answers of a conversation into a document."""
    spans = [_NO_SPANS]
    losses: list[LossArray] = [_NO_LOSSES]
    length = 0
    for answer, (first, last) in zip(conversation.answers, turns.labelled, strict=True):
        start, end = conversation.places[answer]
        spans.append(turns.spans[first:last] - start + length)
        losses.append(turns.values[first:last].astype(np.float32))
        length += end - start
    return StoredDocument(length, np.concatenate(spans), np.concatenate(losses))


def _no_turns(conversation: Conversation) -> TurnTokens:
    """Return no tokens for a conversation."""
    # Every answer ends after 0 tokens, so it fits whenever the student's own tokens fit.
    stops = dict.fromkeys(range(len(conversation.roles)), 0)
    return TurnTokens(math.nan, _NO_LOSSES, _NO_SPANS, _NO_SPANS, stops, 0, _NO_LOSSES)


def _stored_turns(store: Store, conversation: Conversation, train_on: TrainOn) -> TurnTokens | str:
    # The key of a conversation is that of its text in the teacher's own template, which the store
    # keeps, because the student may use another one.
    rendered = Template.of_json(store.manifest).render(conversation)
    if isinstance(rendered, str):
        return rendered
    document = store.document(rendered.text)
    if document is None:
        return MISSING
    if not len(document.losses):
        return EMPTY
    # A store does not know which tokens are special, so only contents have labels.
    turns = read_tokens(conversation, rendered, document.losses, document.spans, None, train_on)
    if isinstance(turns, str):
        return turns
    # 0 is stored for the first token, which nothing predicts.
    return replace(turns, first=math.nan)
