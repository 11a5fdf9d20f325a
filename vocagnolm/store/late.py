"""Losses that arrive while a run trains. Documents are requested before their sequences are read.

A teacher's tokens are known as soon as its tokenizer is, so a corpus is aligned and packed as with
a finished store. Instead of losses, the column `teacher_losses` has each token's index in its
document. `Late.fill` replaces them by losses when a sequence is read. So a run trains on exactly
the same numbers as from a store, bit for bit.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, TurnTokens, read_tokens
from vocagnolm.chat.render import Template
from vocagnolm.conventions import IntArray, TeacherAway
from vocagnolm.cutting import EMPTY
from vocagnolm.packing import Blocks, LateLosses
from vocagnolm.readers import Lacking, Reader, TeacherReaders, whose_template
from vocagnolm.spans import Encoding, Tokens, encode_batch, encode_rendered
from vocagnolm.store.format import LossArray, StoredDocument, document_key
from vocagnolm.store.growing import GrowingStore
from vocagnolm.store.served import ServedScorer, new_answers, read_answers
from vocagnolm.store.windows import Window, document_windows
from vocagnolm.texts import read_texts

if TYPE_CHECKING:
    import datasets

# Larger integers are not all float32 numbers.
_MOST_TOKENS = 2**24
# A server may be away for about as long as requests are repeated. A document without an answer
# after this many seconds is not waited for.
_PATIENCE_S = 900.0
# Files of answers for windows begin with this name.
WINDOWS = "windows"
# How often a wait checks for a signal.
_LOOK_S = 0.5


class LateReader(TeacherReaders):
    """A teacher that is tokenized here, but has its losses elsewhere. Its values are indices."""

    def __init__(self, reader: Reader, place: str):
        super().__init__([reader])
        self._place = place

    def fingerprint(self) -> str:
        """Return everything that determines what is read here."""
        return f"late|{super().fingerprint()}"

    def describe(self) -> list[str]:
        """Say where the losses come from."""
        return [self._place]

    def read(self, texts: Sequence[str]) -> tuple[list[Tokens], Lacking]:
        """Return the tokens of documents, with indices as values."""
        tokens = self.readers[0].read(texts)
        counts = np.diff(tokens.edges)
        places = np.arange(len(tokens.values)) - np.repeat(tokens.edges[:-1], counts)
        return [replace(tokens, values=_as_values(places), start=math.nan)], {}

    def read_turns(
        self, conversations: Sequence[Conversation], train_on: TrainOn
    ) -> list[list[TurnTokens | str]]:
        """Return the tokens of conversations with indices, read like a store of them."""
        return [[self._turns(conversation, train_on) for conversation in conversations]]

    def _turns(self, conversation: Conversation, train_on: TrainOn) -> TurnTokens | str:
        (reader,) = self.readers
        assert reader.template is not None, "templates are checked before"
        rendered = reader.template.render(conversation)
        if isinstance(rendered, str):
            return whose_template(rendered, "teacher")
        try:
            (encoding,) = encode_rendered(reader.tokenizer, [rendered.text])
            places = _as_values(np.arange(len(encoding.ids)))
        except ValueError as error:
            return str(error)
        if not len(places):
            return EMPTY
        turns = read_tokens(conversation, rendered, places, encoding.spans, None, train_on)
        # Nothing predicts the first token.
        return turns if isinstance(turns, str) else replace(turns, first=math.nan)


def _as_values(places: IntArray) -> npt.NDArray[np.float32]:
    if places.max(initial=0) >= _MOST_TOKENS:
        raise ValueError(f"it has more than {_MOST_TOKENS:,} tokens of the teacher")
    return places.astype(np.float32)


class Asker:
    """Asks a server for the losses of documents, in its own thread.

    If a document has several windows, they are also written to a file in a directory. The next
    asker finds them there if this one ends before the document is complete.
    """

    def __init__(self, scorer: ServedScorer, directory: Path):
        self._scorer = scorer
        self._earlier_answers = read_answers(directory / WINDOWS)
        self._path = new_answers(directory / WINDOWS)
        self._file = self._path.open("wb")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="teacher's server", daemon=True
        )
        self._thread.start()
        self._http, self._gate = self._run(self._connect()).result()

    def _run(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self) -> tuple[Any, asyncio.Semaphore]:
        # Both belong to the thread's event loop.
        return self._scorer.connect(), asyncio.Semaphore(self._scorer.concurrency)

    def ask(
        self, windows: Sequence[Window], keep: Callable[[LossArray | str], StoredDocument]
    ) -> Future[StoredDocument]:
        """Ask for the windows of a document. The result is what `keep` makes of the losses.

        If the document has no losses, `keep` gets the reason. It is called in the thread.
        """
        return self._run(self._ask(windows, keep))

    async def _ask(
        self, windows: Sequence[Window], keep: Callable[[LossArray | str], StoredDocument]
    ) -> StoredDocument:
        parts = [np.empty(0, np.float32)]
        ask = self._ask_alone if len(windows) == 1 else self._ask_window
        # Wait for all windows, even after an error, to keep everything that is answered.
        for part in await asyncio.gather(*map(ask, windows), return_exceptions=True):
            if isinstance(part, BaseException):
                raise part
            if isinstance(part, str):
                return keep(part)
            parts.append(part)
        return keep(np.concatenate(parts))

    async def _ask_alone(self, window: Window) -> LossArray | str:
        async with self._gate:
            with _told_of_absence():
                return await self._scorer.ask(self._http, window)

    async def _ask_window(self, window: Window) -> LossArray | str:
        async with self._gate:
            with _told_of_absence():
                return await self._scorer.ask_once(
                    self._http, window, self._earlier_answers, self._file
                )

    def close(self) -> None:
        """Drop unanswered requests, and end the thread."""

        async def leave() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._http.aclose()

        self._run(leave()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()


@contextmanager
def _told_of_absence() -> Iterator[None]:
    """Turn the error of a server that has failed for good into TeacherAway, but not a disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise TeacherAway(str(error)) from error


class Late(LateLosses):
    """The losses of packed sequences, from a store that a server fills as they are needed.

    While it is open, the documents of this process's next `ahead` sequences are requested or
    answered.

    Args:
        blocks: the sequences.
        texts: the documents, and of each segment of the sequences the index of its own.
        scorer: asks the server.
        reader: reads documents for the teacher.
        min_context: as `vocagnolm score` has it.
        template: renders conversations; None for documents.
        is_plain: a document without losses is read as one without a teacher.
    """

    def __init__(
        self,
        blocks: Blocks,
        texts: datasets.Dataset,
        documents: IntArray,
        scorer: ServedScorer,
        reader: Reader,
        min_context: int,
        template: Template | None,
        is_plain: bool,
    ):
        self.scorer, self.reader, self.min_context = scorer, reader, min_context
        self.template = template
        self._blocks, self._texts, self._documents = blocks, texts, documents
        self._is_plain = is_plain
        self._store: GrowingStore | None = None
        self._asker: Asker | None = None
        self._share: Callable[[Sequence[int]], Sequence[int]] = list
        self._is_asked_to_stop: Callable[[], bool] = bool
        self._ahead = 0
        self._order: Sequence[int] = ()
        # How many sequences of the order were read, and how many have been requested.
        self._read = self._sent = 0
        # Documents that were requested, and not read yet.
        self._waiting: dict[bytes, Future[StoredDocument]] = {}

    def open(
        self,
        store: GrowingStore,
        ahead: int,
        share: Callable[[Sequence[int]], Sequence[int]],
        is_asked_to_stop: Callable[[], bool],
    ) -> None:
        """Begin to ask for this process's `share` of an order. A stop ends any wait."""
        self._store, self._ahead, self._share = store, ahead, share
        self._is_asked_to_stop = is_asked_to_stop
        self._asker = Asker(self.scorer, store.directory)

    def keep(self) -> None:
        """Let other processes read this one's answers."""
        if self._store:
            self._store.refresh()

    def close(self) -> None:
        """Ask for nothing more, and keep all answers."""
        if self._asker is None or self._store is None:
            return
        self._asker.close()
        self._store.close()
        self._asker = self._store = None
        self._waiting.clear()
        self._order = ()

    def expect(self, blocks: Sequence[int]) -> None:
        """Learn which sequences all processes read next. Another epoch begins."""
        self._order, self._read, self._sent = self._share(blocks), 0, 0
        # Another process may have asked in its epoch for what this one needs now.
        if self._store:
            self._store.refresh()

    def fill(self, block: int, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a sequence with the losses of its tokens, when they have arrived.

        Raises:
            TeacherAway: the server does not answer, or a signal came during the wait.
            ValueError: a document has no losses, or the server does not know the model.
        """
        self._read += 1
        last = min(self._read + self._ahead, len(self._order))
        for next_block in self._order[self._sent : last]:
            self._send(next_block)
        self._sent = max(self._sent, last)
        # This does nothing, except for a sequence out of order.
        self._send(block)
        filled = {name: list(values) for name, values in columns.items()}
        for row, segment in enumerate(self._blocks.segments(block)):
            text = self._text(segment)
            document = self._document(text)
            if len(document.losses):
                places = filled["teacher_losses"][row]
                filled["teacher_losses"][row] = _at(places, document.losses)
            elif self._is_plain:
                _without_teacher(filled, row)
            else:
                raise ValueError(
                    f"the server has no losses for the document that begins {text[:60]!r}: train "
                    "on such documents without a teacher with --missing_losses plain"
                )
        return filled

    def _text(self, segment: int) -> str:
        index = int(self._documents[segment])
        ((_, text),) = read_texts(self._texts, range(index, index + 1), self.template)
        return text

    def _send(self, block: int) -> None:
        """Ask for the documents of a sequence that are neither in the store nor requested."""
        if self._store is None or self._asker is None:
            raise ValueError("losses from a server are available only during training")
        for segment in self._blocks.segments(block):
            text = self._text(segment)
            key = document_key(text)
            sent = self._waiting.get(key)
            # Repeat a request that has failed, because the server may be back.
            if sent and not (sent.done() and sent.exception()):
                continue
            if self._store.document(text):
                continue
            encoding = self._encode(text)
            start = None if self.template else self.reader.start
            windows = document_windows(
                0, encoding.ids.tolist(), start, self.reader.limit, self.min_context
            )
            keep = self._keeper(key, len(text), encoding)
            self._waiting[key] = self._asker.ask(list(windows), keep)

    def _encode(self, text: str) -> Encoding:
        encode = encode_rendered if self.template else encode_batch
        return encode(self.reader.tokenizer, [text])[0]

    def _keeper(
        self, key: bytes, length: int, encoding: Encoding
    ) -> Callable[[LossArray | str], StoredDocument]:
        """Return a function that makes a document from the losses of its windows and stores it.

        Without --missing_losses plain, a document without losses ends the run. It is not stored, so
        that the same command asks again, perhaps after the server was given a longer context.
        """
        store = self._store
        assert store is not None

        def keep(losses: LossArray | str) -> StoredDocument:
            if isinstance(losses, str):
                document = StoredDocument(length, encoding.spans[:0], np.empty(0, np.float32))
            else:
                # Nothing predicts the first token of a conversation, for which 0 is written.
                unpredicted = np.zeros(len(encoding.ids) - len(losses), np.float32)
                losses = np.concatenate([unpredicted, losses])
                document = StoredDocument(length, encoding.spans, losses)
            if len(document.losses) or self._is_plain:
                store.add(key, document)
            return document

        return keep

    def _document(self, text: str) -> StoredDocument:
        """Return a document from the store or from the server. Waits for it."""
        assert self._store is not None
        future = self._waiting.get(document_key(text))
        if future is None:
            document = self._store.document(text)
            assert document is not None
            return document
        waited_s = 0.0
        while True:
            try:
                document = future.result(_LOOK_S)
                break
            except NotYet:
                waited_s += _LOOK_S
            if self._is_asked_to_stop():
                raise TeacherAway("stopped by a signal while waiting for the teacher's server")
            if waited_s >= _PATIENCE_S:
                raise TeacherAway(
                    f"--teacher_server has not answered for {_PATIENCE_S:.0f} s: check it, and "
                    "give the same command again to continue"
                )
        del self._waiting[document_key(text)]
        return document


def _at(places: npt.NDArray[np.float32], losses: LossArray) -> LossArray:
    """Return the losses at these indices. NaN stays.

    >>> _at(np.array([np.nan, 2, 0], np.float32), np.array([5, 6, 7], np.float32)).tolist()
    [nan, 7.0, 5.0]
    """
    row = np.full(len(places), np.nan, np.float32)
    is_known = ~np.isnan(places)
    row[is_known] = losses[places[is_known].astype(np.int64)]
    return row


def _without_teacher(columns: dict[str, list[Any]], row: int) -> None:
    """Make a segment what it is without a teacher: only the teacher's start token is left."""
    columns["teacher_losses"][row] = np.full(1, np.nan, np.float32)
    columns["teacher_counts"][row] = np.ones(1, np.int64)
    for name in ("teacher_codes", "teacher_exceptions", "teacher_labelled"):
        columns[name][row] = columns[name][row][:0]
