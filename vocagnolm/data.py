"""From documents to aligned segments: what both models read, and which tokens guide which.

Enters: a corpus with a `text` column and one or two tokenizers. Leaves: a `datasets.Dataset` with
one row per segment, memory-mapped and cached. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from vocagnolm.alignment import align_positions, align_spans, covered_shares
from vocagnolm.conventions import UNMAPPED
from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.host.cache import verified_cache
from vocagnolm.spans import Encoding, Spans, encode_batch
from vocagnolm.tokenizers import Reader

# Raise it when the columns or the segmentation change: old caches must not be read.
_FORMAT = 4
# Why a document is skipped that a guide does not know.
MISSING = "not in the teacher-loss store, or another text there"
# Aim below the limit: parts of one text are not equally dense in tokens.
_FILL = 0.95
_SEPARATORS = ("\n\n", "\n", " ")
_NUMBERS = datasets.List(datasets.Value("int32"))
_FEATURES = datasets.Features(
    {
        **dict.fromkeys(("document", "start", "end"), datasets.Value("int64")),
        **dict.fromkeys(("student_ids", "teacher_ids", "first", "last", "cut"), _NUMBERS),
        **dict.fromkeys(("teacher_losses", "shares"), datasets.List(datasets.Value("float32"))),
        **dict.fromkeys(("student_tokens", "teacher_tokens"), datasets.Value("int32")),
        "teacher_counts": _NUMBERS,
        "unmapped_text_tokens": datasets.Value("int32"),
        "skipped": datasets.Value("string"),
    }
)


@dataclass(frozen=True)
class Piece:
    """A run of characters of a document, before it is known to fit."""

    document: int
    start: int
    text: str
    is_last: bool

    @property
    def end(self) -> int:
        """The character behind it."""
        return self.start + len(self.text)


@dataclass(frozen=True)
class TeacherTokens:
    """N tokens of a teacher in a piece: ids if it is co-resident, losses if they are stored.

    Spans are in characters of the piece. Of N + 1 ids, or losses in nats, the first is that of the
    start token, NaN for its loss.
    """

    spans: Spans
    ids: Sequence[int] = ()
    losses: Sequence[float] = ()


class Guide(Protocol):
    """The teachers' side of the alignment: `Teachers`, or a store's `StoredReader`."""

    # Of the co-resident teachers; none with a store, which has losses only.
    readers: tuple[Reader, ...]
    # Map tokens by number instead of by characters (`alignment.align_positions`).
    by_position: bool

    def limits(self) -> list[int]:
        """Return the most tokens of a segment that each teacher reads, its start token counted."""

    def fingerprint(self) -> str:
        """Return all that decides what is read and mapped."""

    def check(self) -> None:
        """Raise a ValueError if what is read from is damaged."""
        return

    def describe(self) -> list[str]:
        """Name each teacher that is not loaded as a model, and the source of its losses."""
        return []

    def pieces(self, document: int, text: str) -> Sequence[Piece]:
        """Return a document in the pieces that must not be joined; none where it is unknown."""

    def read(self, pieces: Sequence[Piece]) -> list[list[TeacherTokens]]:
        """Return the tokens of every teacher in every piece."""


@dataclass(frozen=True)
class Teachers(Guide):
    """Co-resident teachers; none of them for a student that is trained alone."""

    readers: tuple[Reader, ...]
    by_position: bool = False

    def limits(self) -> list[int]:
        """Return the readers' limits."""
        return [reader.limit for reader in self.readers]

    def fingerprint(self) -> str:
        """Return the readers' fingerprints, and the way of mapping."""
        readers = "|".join(reader.fingerprint() for reader in self.readers)
        return f"{readers}|by position" if self.by_position else readers

    def pieces(self, document: int, text: str) -> Sequence[Piece]:
        """Return the document as one piece."""
        return [Piece(document, 0, text, is_last=True)]

    def read(self, pieces: Sequence[Piece]) -> list[list[TeacherTokens]]:
        """Encode every piece with every teacher's tokenizer."""
        texts = [piece.text for piece in pieces]
        reads: list[list[TeacherTokens]] = [[] for _ in pieces]
        for reader in self.readers:
            for mine, one in zip(reads, encode_batch(reader.tokenizer, texts), strict=True):
                mine.append(TeacherTokens(one.spans, ids=[reader.start, *one.ids.tolist()]))
        return reads


@dataclass(frozen=True)
class Segments:
    """The aligned segments of a corpus, a row for each, ordered by document and position.

    `student_ids` and `teacher_ids` hold the special tokens too; `first`, `last` hold for every
    student token its half-open range of teacher tokens in the row, (-1, -1) where it is unmapped.
    From a store come `teacher_losses` instead of `teacher_ids`, NaN for a start token. Several
    teachers' tokens follow one another, `teacher_counts` of each, and so do whole copies of `first`
    and `last`. `shares` has the numbers of `covered_shares` that are not 1, and `cut` where they
    stand among all, [teachers, student tokens, 3] flat.
    """

    rows: datasets.Dataset
    # (document, reason) of each document that has no segment.
    skipped: list[tuple[int, str]]

    def _column(self, name: str) -> npt.NDArray[np.int64]:
        return np.asarray(self.rows.with_format("numpy")[name][:])

    def total(self, column: str) -> int:
        """Sum of an integer column."""
        return int(self._column(column).sum())

    def split(self, fraction: float, seed: int) -> tuple[Segments, Segments]:
        """Hold out a share of the documents: (the rest, the held-out ones)."""
        documents = self._column("document")
        numbers = np.unique(documents)
        # Rounded first: 7 % of 100 are 7, not 8.
        count = math.ceil(round(fraction * len(numbers), 6))
        held_out = np.random.default_rng(seed).permutation(numbers)[:count]
        is_held_out = np.isin(documents, held_out)
        rest, held = (self.rows.select(np.flatnonzero(m)) for m in (~is_held_out, is_held_out))
        return Segments(rest, []), Segments(held, [])

    def digest(self) -> str:
        """A short name for the lengths of all segments in order: another corpus has another."""
        names = ("document", "student_tokens", "teacher_tokens")
        content = b"".join(self._column(name).tobytes() for name in names)
        return hashlib.sha256(content).hexdigest()[:16]

    def write_skipped(self, path: str | Path) -> None:
        """List the documents that were left out, with the reasons, in a JSON lines file."""
        if self.skipped:
            rows = (json.dumps({"document": d, "reason": why}) + "\n" for d, why in self.skipped)
            Path(path).write_text("".join(rows), encoding="utf-8")

    @property
    def mapped_text_fraction(self) -> float:
        """Share of the student's text tokens that have a teacher range, in [0, 1]."""
        # Without a start token for each segment, and an end token for each document.
        documents = len(np.unique(self._column("document")))
        text_tokens = self.total("student_tokens") - len(self.rows) - documents
        return 1.0 - self.total("unmapped_text_tokens") / max(text_tokens, 1)


def align_corpus(
    corpus: datasets.Dataset,
    student: Reader,
    teacher: Reader | Guide | None,
    *,
    num_proc: int | None = None,
) -> Segments:
    """Cut every document into segments that both readers can hold, and align the two encodings.

    The result is cached beside the corpus under a fingerprint of the corpus, both readers and the
    format, and is read from there the next time if it is as it was written. A single teacher may be
    given by its reader.
    """
    # map would return it unchanged.
    if not len(corpus):
        return Segments(datasets.Dataset.from_dict({c: [] for c in _FEATURES}, _FEATURES), [])
    # Threads inside of each process would fight over the cores.
    if num_proc is not None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    guide = Teachers((teacher,)) if isinstance(teacher, Reader) else teacher or Teachers(())
    readers = f"{student.fingerprint()}|{teacher.fingerprint() if teacher else None}"
    key = f"{_FORMAT}|{corpus._fingerprint}|{readers}"
    fingerprint = hashlib.sha256(key.encode()).hexdigest()[:32]
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    with verified_cache(corpus.cache_files, fingerprint):
        rows = corpus.map(
            _align_batch,
            with_indices=True,
            batched=True,
            batch_size=256,
            num_proc=num_proc,
            remove_columns=corpus.column_names,
            features=_FEATURES,
            fn_kwargs={"student": student, "guide": guide},
            new_fingerprint=fingerprint,
            desc="Aligning documents",
        ).with_format(None)
    is_skipped = rows.data.column("skipped").is_valid()
    if not pc.any(is_skipped).as_py():
        return Segments(rows, [])
    names = ("document", "skipped")
    columns = (rows.data.column(name).filter(is_skipped).to_pylist() for name in names)
    kept = np.flatnonzero(pc.invert(is_skipped))
    return Segments(rows.select(kept), list(zip(*columns, strict=True)))


def _align_batch(
    batch: Mapping[str, Any], indices: list[int], student: Reader, guide: Guide
) -> dict[str, list[Any]]:
    """Make the rows of some documents; one that is skipped gets a single row with the reason."""
    skipped: dict[int, str] = {}
    pieces: list[Piece] = []
    for index, text in zip(indices, values(batch[TEXT]), strict=True):
        if reason := unusable(text):
            skipped[index] = reason
        elif found := guide.pieces(index, text):
            pieces += found
        else:
            skipped[index] = MISSING
    rows: list[dict[str, Any]] = []
    # Whatever does not fit is cut, and read again, until every piece fits; no tokenizer says where.
    while pieces:
        too_long: list[Piece] = []
        for piece, encodings in zip(pieces, _encode(pieces, student, guide), strict=True):
            if isinstance(encodings, str):
                skipped[piece.document] = encodings
            elif (share := _share(*encodings, student, guide)) <= 1.0:
                rows.append(_align_piece(piece, *encodings, student, guide.by_position))
            elif len(piece.text) > 1:
                too_long += _cut(piece, math.ceil(share / _FILL))
            else:
                skipped[piece.document] = f"character {piece.start} alone exceeds a context"
        pieces = too_long
    rows = [row for row in rows if row["document"] not in skipped]
    rows += [{"document": index, "start": 0, "skipped": why} for index, why in skipped.items()]
    rows.sort(key=lambda row: (row["document"], row["start"]))
    return {name: [row.get(name) for row in rows] for name in _FEATURES}


def _encode(
    pieces: Sequence[Piece], student: Reader, guide: Guide
) -> list[tuple[Encoding, list[TeacherTokens]] | str]:
    """Return all encodings of every piece, or the reason why a piece cannot be aligned."""
    try:
        ours = encode_batch(student.tokenizer, [piece.text for piece in pieces])
        theirs = guide.read(pieces)
    except ValueError as error:
        # One piece of many is at fault: read alone, it alone is skipped.
        if len(pieces) > 1:
            return [_encode([piece], student, guide)[0] for piece in pieces]
        return [str(error)]
    empty = "a tokenizer finds no token in it"
    return [
        (one, reads) if len(one.ids) and all(len(read.spans) for read in reads) else empty
        for one, reads in zip(ours, theirs, strict=True)
    ]


def _share(
    encoding: Encoding, reads: Sequence[TeacherTokens], student: Reader, guide: Guide
) -> float:
    """Return the share of the tightest context that a piece takes; over 1 it does not fit."""
    # A teacher's limit counts the start token.
    limits = (limit - 1 for limit in guide.limits())
    theirs = (len(read.spans) / limit for read, limit in zip(reads, limits, strict=True))
    return max([len(encoding.ids) / student.text_limit, *theirs])


def _cut(piece: Piece, parts: int) -> list[Piece]:
    """Cut a piece into about equal parts, by characters, where a paragraph, line or word ends.

    The separator stays with the text before it; an indented line still begins with white space.
    """
    budget = max(1, min(math.ceil(len(piece.text) / parts), len(piece.text) - 1))
    cuts = [0]
    while len(piece.text) - cuts[-1] > budget:
        # Look for the best separator in the last eighth of the budget:
        #
        #   cuts[-1] .............................. floor ....... stop
        #   |<------------------------- budget ------------------->|
        stop = cuts[-1] + budget
        floor = stop - budget // 8
        found = (piece.text.rfind(mark, floor, stop) + len(mark) for mark in _SEPARATORS)
        cuts.append(next((cut for cut in found if floor < cut <= stop), stop))
    pairs = pairwise([*cuts, len(piece.text)])
    pieces = [replace(piece, start=piece.start + a, text=piece.text[a:b]) for a, b in pairs]
    return [*(replace(part, is_last=False) for part in pieces[:-1]), pieces[-1]]


def _align_piece(
    piece: Piece,
    encoding: Encoding,
    reads: Sequence[TeacherTokens],
    student: Reader,
    by_position: bool,
) -> dict[str, Any]:
    """Make one row: the encodings with their special tokens, and every student token's ranges."""
    tokens, counts = len(encoding.ids), [1 + len(read.spans) for read in reads]
    end = [student.end] if piece.is_last and student.end is not None else []
    ranges = np.full((max(len(reads), 1), tokens, 2), UNMAPPED)
    shares = np.ones((len(ranges), tokens, 3), np.float32)
    # The teachers' tokens follow one another in the row, each behind its own start token:
    #
    #   B a b c | B d e         counts [4, 3]
    #     0 1 2     0 1         as `align_spans` counts them
    #     1 2 3     5 6         as the row does: + sum(counts before) + 1
    for number, (mine, read) in enumerate(zip(ranges, reads, strict=False)):
        if by_position:
            mine[:] = align_positions(tokens, len(read.spans))
        else:
            mine[:] = align_spans(encoding.spans, read.spans)
            shares[number] = covered_shares(encoding.spans, read.spans, mine)
        mine[mine[:, 0] != UNMAPPED] += sum(counts[:number]) + 1
    # The student's own special tokens are unmapped.
    special = ((0, 0), (1, len(end)), (0, 0))
    first, last = np.pad(ranges, special, constant_values=UNMAPPED).reshape(-1, 2).T
    all_shares = np.pad(shares, special, constant_values=1).ravel()
    cut = np.flatnonzero(all_shares != 1)
    return {
        "document": piece.document,
        "start": piece.start,
        "end": piece.end,
        "student_ids": [student.start, *encoding.ids.tolist(), *end],
        "teacher_ids": [token for read in reads for token in read.ids],
        "teacher_losses": [loss for read in reads for loss in read.losses],
        "first": first,
        "last": last,
        "cut": cut,
        "shares": all_shares[cut],
        "student_tokens": 1 + tokens + len(end),
        "teacher_tokens": sum(counts),
        "teacher_counts": counts,
        "unmapped_text_tokens": int((ranges[..., 0] == UNMAPPED).any(0).sum()),
    }
