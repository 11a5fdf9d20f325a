"""From documents to aligned segments: what both models read, and which tokens guide which.

Enters: a corpus with a `text` column and one or two tokenizers. Leaves: a `datasets.Dataset` with
one row per segment, memory-mapped and cached. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc

from vocagnolm.alignment import align_positions, align_spans
from vocagnolm.conventions import UNMAPPED
from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.spans import Encoding, Spans, encode_batch
from vocagnolm.store.reader import MISSING, StoredDocument, StoredReader
from vocagnolm.tokenizers import start_id

FORMAT = 3  # raise when the columns or the segmentation change: old caches must not be read
_FILL = 0.95  # aim below the limit: parts of one text are not equally dense in tokens
_SEPARATORS = ("\n\n", "\n", " ")
_NUMBERS = datasets.List(datasets.Value("int32"))
_FEATURES = datasets.Features(
    {
        **dict.fromkeys(("document", "start", "end"), datasets.Value("int64")),
        **dict.fromkeys(("student_ids", "teacher_ids", "first", "last"), _NUMBERS),
        "teacher_losses": datasets.List(datasets.Value("float32")),
        **dict.fromkeys(("student_tokens", "teacher_tokens"), datasets.Value("int32")),
        "teacher_counts": _NUMBERS,
        "unmapped_text_tokens": datasets.Value("int32"),
        "skipped": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Reader:
    """How one model reads a segment: its tokenizer, the special tokens around it and its limit.

    Attributes:
        tokenizer: a fast tokenizer that passed `tokenizers.check_tokenizer`.
        start: id put before the text, so that the first real token has a loss.
        end: id put after the last segment of a document, or None for none.
        limit: the most tokens of a segment, specials counted.
    """

    tokenizer: Any
    start: int
    end: int | None
    limit: int

    @property
    def text_limit(self) -> int:
        """The most text tokens of a segment."""
        return self.limit - 1 - (self.end is not None)

    def limits(self) -> list[int]:
        """The limit, as of the several readers of `Teachers`."""
        return [self.limit]

    def fingerprint(self) -> str:
        """Everything that decides how this reader cuts and encodes a text."""
        return f"{self.tokenizer.backend_tokenizer.to_str()}|{self.start}|{self.end}|{self.limit}"


def student_reader(tokenizer: Any, max_length: int) -> Reader:
    """Read documents as `<s> text </s>` in at most `max_length` tokens."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"student tokenizer {tokenizer.name_or_path} has no end-of-sequence token: the student "
            "would never learn to stop; set eos_token in its tokenizer_config.json"
        )
    return Reader(tokenizer, start_id(tokenizer, "student"), tokenizer.eos_token_id, max_length)


def teacher_reader(tokenizer: Any, context: int) -> Reader:
    """Read documents as `<start> text` in at most `context` tokens."""
    return Reader(tokenizer, start_id(tokenizer, "teacher"), None, context)


@dataclass(frozen=True)
class Teachers:
    """How several teachers read, and how their tokens are mapped to the student's.

    Attributes:
        readers: one for each.
        by_position: map tokens by number instead of by characters (`alignment.align_positions`).
    """

    readers: tuple[Reader, ...]
    by_position: bool = False

    def limits(self) -> list[int]:
        """The most tokens of a segment that each teacher reads, its start token counted."""
        return [reader.limit for reader in self.readers]

    def fingerprint(self) -> str:
        """Everything that decides what is read and mapped."""
        readers = "|".join(reader.fingerprint() for reader in self.readers)
        return readers + "|by position" * self.by_position


Guide = Reader | Teachers | StoredReader  # the teachers' side of the alignment


@dataclass(frozen=True)
class Segments:
    """The aligned segments of a corpus.

    Attributes:
        rows: one row per segment, ordered by document and position. `student_ids` and
            `teacher_ids` hold the special tokens; `first`, `last` hold for every student token
            its half-open range of teacher tokens in the row, (-1, -1) where it is unmapped. From
            a store come `teacher_losses` instead of `teacher_ids`, NaN for a start token. Several
            teachers' tokens follow one another, `teacher_counts` of each, and so do whole copies of
            `first` and `last`.
        skipped: (document, reason) of each document that has no segment.
    """

    rows: datasets.Dataset
    skipped: list[tuple[int, str]]

    def total(self, column: str) -> int:
        """Sum of an integer column."""
        return int(np.sum(self.rows.with_format("numpy")[column][:])) if len(self.rows) else 0

    def split(self, fraction: float, seed: int) -> tuple[Segments, Segments]:
        """Hold out a share of the documents: (the rest, the held-out ones)."""
        documents = self.rows.with_format("numpy")["document"][:]
        numbers = np.unique(documents)
        count = math.ceil(round(fraction * len(numbers), 6))  # 7 % of 100 are 7, not 8
        held_out = np.random.default_rng(seed).permutation(numbers)[:count]
        is_held_out = np.isin(documents, held_out)
        rest, held = (
            Segments(self.rows.select(np.flatnonzero(chosen)), [])
            for chosen in (~is_held_out, is_held_out)
        )
        return rest, held

    def digest(self) -> str:
        """A short name for the lengths of all segments in order: another corpus has another."""
        columns = self.rows.with_format("numpy")
        digest = hashlib.sha256()
        for name in ("document", "student_tokens", "teacher_tokens"):
            digest.update(np.ascontiguousarray(columns[name][:]).tobytes())
        return digest.hexdigest()[:16]

    def write_skipped(self, path: str | Path) -> None:
        """List the documents that were left out, with the reasons, in a JSON lines file."""
        if self.skipped:
            with open(path, "w", encoding="utf-8") as file:
                for document, reason in self.skipped:
                    file.write(json.dumps({"document": document, "reason": reason}) + "\n")

    @property
    def mapped_text_fraction(self) -> float:
        """Share of the student's text tokens that have a teacher range, in [0, 1]."""
        documents = len(np.unique(self.rows.with_format("numpy")["document"][:]))
        text_tokens = self.total("student_tokens") - len(self.rows) - documents
        return 1.0 - self.total("unmapped_text_tokens") / max(text_tokens, 1)


def align_corpus(
    corpus: datasets.Dataset,
    student: Reader,
    teacher: Guide | None,
    *,
    num_proc: int | None = None,
) -> Segments:
    """Cut every document into segments that both readers can hold, and align the two encodings.

    The result is cached beside the corpus under a fingerprint of the corpus, both readers and the
    format, and is read from there the next time.

    Args:
        corpus: documents in the column `text`.
        student: how the student reads.
        teacher: how the teacher reads, or several do, or read when they were stored, if any.
        num_proc: processes to share the work.
    """
    if not len(corpus):  # map would return it as it is
        return Segments(datasets.Dataset.from_dict({c: [] for c in _FEATURES}, _FEATURES), [])
    if num_proc is not None:  # threads inside of each process would fight over the cores
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    readers = f"{student.fingerprint()}|{teacher.fingerprint() if teacher else None}"
    key = f"{FORMAT}|{corpus._fingerprint}|{readers}"
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    rows = corpus.map(
        _align_batch,
        with_indices=True,
        batched=True,
        batch_size=256,
        num_proc=num_proc,
        remove_columns=corpus.column_names,
        features=_FEATURES,
        fn_kwargs={"student": student, "teacher": teacher},
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
        desc="Aligning documents",
    ).with_format(None)
    reasons = rows.data.column("skipped")
    kept = np.flatnonzero(pc.is_null(reasons).to_numpy(zero_copy_only=False))
    if len(kept) == len(rows):
        return Segments(rows, [])
    missing = rows.select(np.setdiff1d(np.arange(len(rows)), kept))
    return Segments(
        rows.select(kept), list(zip(missing["document"], missing["skipped"], strict=True))
    )


@dataclass(frozen=True)
class _Piece:
    """A run of characters of a document, before it is known to fit."""

    document: int
    start: int
    text: str
    is_last: bool
    stored: StoredDocument | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(frozen=True)
class _Read:
    """One teacher's tokens of a piece: its ids where it is at hand, its losses where it is not."""

    spans: Spans
    ids: list[int] | None = None
    losses: list[float] | None = None


def _align_batch(
    batch: Mapping[str, Any],
    indices: list[int],
    student: Reader,
    teacher: Guide | None,
) -> dict[str, list[Any]]:
    by_position = isinstance(teacher, Teachers) and teacher.by_position
    skipped: dict[int, str] = {}
    pieces: list[_Piece] = []
    for index, text in zip(indices, values(batch[TEXT]), strict=True):
        if reason := unusable(text):
            skipped[index] = reason
        elif not isinstance(teacher, StoredReader):
            pieces.append(_Piece(index, 0, text, is_last=True))
        elif stored := teacher.read(text):
            pieces += _stored_pieces(index, text, stored)
        else:
            skipped[index] = MISSING
    rows: list[dict[str, Any]] = []
    while pieces:
        too_long: list[_Piece] = []
        for piece, encodings in zip(pieces, _encode(pieces, student, teacher), strict=True):
            if isinstance(encodings, str):
                skipped[piece.document] = encodings
            elif (share := _share(encodings, student, teacher)) <= 1.0:
                rows.append(_align_piece(piece, *encodings, student, by_position))
            elif len(piece.text) > 1:
                too_long += _cut(piece, math.ceil(share / _FILL))
            else:
                skipped[piece.document] = f"character {piece.start} alone exceeds a context"
        pieces = too_long
    rows = [row for row in rows if row["document"] not in skipped]
    rows += [{"document": index, "start": 0, "skipped": why} for index, why in skipped.items()]
    rows.sort(key=lambda row: (row["document"], row["start"]))
    return {name: [row.get(name) for row in rows] for name in _FEATURES}


def _stored_pieces(index: int, text: str, stored: StoredDocument) -> list[_Piece]:
    """A stored document, cut where its teacher's segments begin."""
    return [
        _Piece(index, start, text[start:end], end == len(text), stored)
        for start, end in pairwise([*stored.cuts, len(text)])
    ]


def _encode(
    pieces: list[_Piece], student: Reader, teacher: Guide | None
) -> list[tuple[Encoding, list[_Read]] | str]:
    """All encodings of every piece, or the reason why a piece cannot be aligned."""
    try:
        ours = encode_batch(student.tokenizer, [piece.text for piece in pieces])
        theirs = _read(pieces, teacher)
    except ValueError as error:
        if len(pieces) == 1:
            return [str(error)]
        return [_encode([piece], student, teacher)[0] for piece in pieces]  # which one is it?
    return [
        (encoding, reads)
        if len(encoding.ids) and all(len(read.spans) for read in reads)
        else "a tokenizer finds no token in it"
        for encoding, reads in zip(ours, theirs, strict=True)
    ]


def _read(pieces: list[_Piece], teacher: Guide | None) -> list[list[_Read]]:
    """What every teacher reads in every piece: none without one, several with several stores."""
    if teacher is None:
        return [[] for _ in pieces]
    if not isinstance(teacher, StoredReader):
        texts = [piece.text for piece in pieces]
        readers = (teacher,) if isinstance(teacher, Reader) else teacher.readers
        by_reader = (
            [
                _Read(e.spans, ids=[reader.start, *e.ids.tolist()])
                for e in encode_batch(reader.tokenizer, texts)
            ]
            for reader in readers
        )
        return [list(reads) for reads in zip(*by_reader, strict=True)]
    return [
        [
            _Read(tokens.spans, losses=[math.nan, *tokens.losses.tolist()])
            for tokens in piece.stored.between(piece.start, piece.end)
        ]
        for piece in pieces
        if piece.stored is not None
    ]


def _share(
    encodings: tuple[Encoding, list[_Read]], student: Reader, teacher: Guide | None
) -> float:
    """How much of the tightest context a piece takes; over 1 it does not fit."""
    encoding, reads = encodings
    limits = teacher.limits() if teacher else []
    shares = (len(read.spans) / (n - 1) for read, n in zip(reads, limits, strict=True))
    return max(len(encoding.ids) / student.text_limit, *shares, 0.0)


def _cut(piece: _Piece, parts: int) -> list[_Piece]:
    """Cut a piece into about equal parts, by characters, where a paragraph, line or word ends.

    Neither tokenizer decides where; a part that still does not fit is cut again. White space stays
    with the text before it, so that a segment begins with a word, as a document does.
    """
    budget = max(1, min(math.ceil(len(piece.text) / parts), len(piece.text) - 1))
    cuts = [0]
    while len(piece.text) - cuts[-1] > budget:
        stop = cuts[-1] + budget
        floor = stop - budget // 8
        found = (piece.text.rfind(mark, floor, stop) + len(mark) for mark in _SEPARATORS)
        cuts.append(next((cut for cut in found if floor < cut <= stop), stop))
    cuts.append(len(piece.text))
    return [
        replace(
            piece,
            start=piece.start + a,
            text=piece.text[a:b],
            is_last=piece.is_last and b == len(piece.text),
        )
        for a, b in pairwise(cuts)
    ]


def _align_piece(
    piece: _Piece, encoding: Encoding, reads: list[_Read], student: Reader, by_position: bool
) -> dict[str, Any]:
    """One row: the encodings with their special tokens, and the ranges of every student token."""
    end = [student.end] if piece.is_last and student.end is not None else []
    ranges = np.full((max(len(reads), 1), len(encoding.ids), 2), UNMAPPED)
    counts = [1 + len(read.spans) for read in reads]
    for number, (mine, read) in enumerate(zip(ranges, reads, strict=False)):
        if by_position:
            mine[:] = align_positions(len(encoding.ids), len(read.spans))
        else:
            mine[:] = align_spans(encoding.spans, read.spans)
        # Behind the teachers before it and its own start token.
        mine[mine[:, 0] != UNMAPPED] += sum(counts[:number]) + 1
    padded = np.pad(ranges, ((0, 0), (1, len(end)), (0, 0)), constant_values=UNMAPPED)
    first, last = padded.reshape(-1, 2).T
    return {
        "document": piece.document,
        "start": piece.start,
        "end": piece.end,
        "student_ids": [student.start, *encoding.ids.tolist(), *end],
        "teacher_ids": [token for read in reads for token in read.ids or ()],
        "teacher_losses": [loss for read in reads for loss in read.losses or ()],
        "first": first,
        "last": last,
        "student_tokens": 1 + len(encoding.ids) + len(end),
        "teacher_tokens": sum(counts),
        "teacher_counts": counts,
        "unmapped_text_tokens": int((ranges[..., 0] == UNMAPPED).any(0).sum()),
    }
