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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.alignment import UNMAPPED, align_spans
from vocagnolm.corpus import TEXT
from vocagnolm.spans import Encoding, encode_batch, start_id

FORMAT = 1  # raise when the columns or the segmentation change: old caches must not be read
_FILL = 0.95  # aim below the limit: parts of one text are not equally dense in tokens
_SEPARATORS = ("\n\n", "\n", " ")
_FEATURES = datasets.Features(
    {
        "document": datasets.Value("int64"),
        "start": datasets.Value("int64"),
        "end": datasets.Value("int64"),
        "student_ids": datasets.List(datasets.Value("int32")),
        "teacher_ids": datasets.List(datasets.Value("int32")),
        "first": datasets.List(datasets.Value("int32")),
        "last": datasets.List(datasets.Value("int32")),
        "student_tokens": datasets.Value("int32"),
        "teacher_tokens": datasets.Value("int32"),
        "unmapped_text_tokens": datasets.Value("int32"),
        "skipped": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Reader:
    """How one model reads a segment: its tokenizer, the special tokens around it and its limit.

    Attributes:
        tokenizer: a fast tokenizer that passed `spans.check_tokenizer`.
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
class Segments:
    """The aligned segments of a corpus.

    Attributes:
        rows: one row per segment, ordered by document and position. `student_ids` and
            `teacher_ids` hold the special tokens; `first`, `last` hold for every student token
            its half-open range of teacher tokens in the row, (-1, -1) where it is unmapped.
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
    teacher: Reader | None,
    *,
    num_proc: int | None = None,
) -> Segments:
    """Cut every document into segments that both readers can hold, and align the two encodings.

    The result is cached beside the corpus under a fingerprint of the corpus, both readers and the
    format, and is read from there the next time.

    Args:
        corpus: documents in the column `text`.
        student: how the student reads.
        teacher: how the teacher reads, or None for a run without one; then no token is mapped.
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


def _align_batch(
    batch: Mapping[str, Any], indices: list[int], student: Reader, teacher: Reader | None
) -> dict[str, list[Any]]:
    skipped: dict[int, str] = {}
    pieces: list[_Piece] = []
    for index, text in zip(indices, _values(batch[TEXT]), strict=True):
        if reason := _unusable(text):
            skipped[index] = reason
        else:
            pieces.append(_Piece(index, 0, text, is_last=True))
    rows: list[dict[str, Any]] = []
    while pieces:
        too_long: list[_Piece] = []
        for piece, encodings in zip(pieces, _encode(pieces, student, teacher), strict=True):
            if isinstance(encodings, str):
                skipped[piece.document] = encodings
            elif (share := _share(encodings, student, teacher)) <= 1.0:
                rows.append(_align_piece(piece, *encodings, (student, teacher)))
            elif len(piece.text) > 1:
                too_long += _cut(piece, math.ceil(share / _FILL))
            else:
                skipped[piece.document] = f"character {piece.start} alone exceeds a context"
        pieces = too_long
    rows = [row for row in rows if row["document"] not in skipped]
    rows += [{"document": index, "start": 0, "skipped": why} for index, why in skipped.items()]
    rows.sort(key=lambda row: (row["document"], row["start"]))
    return {name: [row.get(name) for row in rows] for name in _FEATURES}


def _values(column: pa.ChunkedArray | list[Any]) -> list[Any]:
    """The values of a column; bytes where they should be text and are not valid UTF-8."""
    if isinstance(column, list):
        return column
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decode(value) for value in column.cast(pa.binary()).to_pylist()]


def _decode(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _unusable(text: Any) -> str | None:
    if isinstance(text, bytes):
        return "not valid UTF-8"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    if not text or text.isspace():
        return "empty"
    return None


def _encode(
    pieces: list[_Piece], student: Reader, teacher: Reader | None
) -> list[tuple[Encoding, Encoding | None] | str]:
    """Both encodings of every piece, or the reason why a piece cannot be aligned."""
    texts = [piece.text for piece in pieces]
    try:
        ours = encode_batch(student.tokenizer, texts)
        theirs = encode_batch(teacher.tokenizer, texts) if teacher else [None] * len(texts)
    except ValueError as error:
        if len(pieces) == 1:
            return [str(error)]
        return [_encode([piece], student, teacher)[0] for piece in pieces]  # which one is it?
    return [
        "a tokenizer finds no token in it" if not len(s.ids) or (t and not len(t.ids)) else (s, t)
        for s, t in zip(ours, theirs, strict=True)
    ]


def _share(
    encodings: tuple[Encoding, Encoding | None], student: Reader, teacher: Reader | None
) -> float:
    """How much of the tighter context a piece takes; over 1 it does not fit."""
    share = len(encodings[0].ids) / student.text_limit
    if teacher and encodings[1]:
        share = max(share, len(encodings[1].ids) / teacher.text_limit)
    return share


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
        _Piece(
            piece.document,
            piece.start + a,
            piece.text[a:b],
            piece.is_last and b == len(piece.text),
        )
        for a, b in pairwise(cuts)
    ]


def _align_piece(
    piece: _Piece,
    student: Encoding,
    teacher: Encoding | None,
    readers: tuple[Reader, Reader | None],
) -> dict[str, Any]:
    """One row: both encodings with their special tokens, and the range of every student token."""
    ours, theirs = readers
    end = [ours.end] if piece.is_last and ours.end is not None else []
    ranges = np.full((len(student.ids), 2), UNMAPPED)
    teacher_ids: list[int] = []
    if teacher is not None and theirs is not None:
        ranges = align_spans(student.spans, teacher.spans)
        ranges[ranges[:, 0] != UNMAPPED] += 1  # the teacher's start token comes first
        teacher_ids = [theirs.start, *teacher.ids.tolist()]
    first, last = np.pad(ranges, ((1, len(end)), (0, 0)), constant_values=UNMAPPED).T
    return {
        "document": piece.document,
        "start": piece.start,
        "end": piece.start + len(piece.text),
        "student_ids": [ours.start, *student.ids.tolist(), *end],
        "teacher_ids": teacher_ids,
        "first": first,
        "last": last,
        "student_tokens": 1 + len(student.ids) + len(end),
        "teacher_tokens": len(teacher_ids),
        "unmapped_text_tokens": int((ranges[:, 0] == UNMAPPED).sum()),
    }
