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
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import Timeout

from vocagnolm.alignment import align_positions, align_spans, narrow_spans
from vocagnolm.conventions import UNMAPPED
from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.host.cache import verified_cache
from vocagnolm.spans import Encoding, encode_batch
from vocagnolm.tokenizers import Guide, Piece, Reader, Teachers, TeacherTokens

# Raise it when the columns or the segmentation change: old caches must not be read.
_FORMAT = 6
# Documents that are aligned, cached and checked together: minutes of work.
_PART = 100_000
# Why a document is skipped that a guide does not know.
MISSING = "not in the teacher-loss store, or another text there"
# Aim below the limit: parts of one text are not equally dense in tokens.
_FILL = 0.95
_SEPARATORS = ("\n\n", "\n", " ")
# Types of the arrays of a row; ids are narrower where a vocabulary allows it.
_ARRAYS = {
    **dict.fromkeys(("student_ids", "teacher_ids", "teacher_counts"), "int32"),
    "teacher_losses": "float32",
    **dict.fromkeys(("student_steps", "teacher_steps"), "uint8"),
    **dict.fromkeys(("student_jumps", "teacher_jumps"), "int32"),
}
_NUMBERS = (
    *("document", "start", "end"),
    *("student_tokens", "teacher_tokens", "unmapped_text_tokens"),
)


@dataclass(frozen=True)
class Segments:
    """The aligned segments of a corpus, a row for each, ordered by document and position.

    `student_ids` and `teacher_ids` hold the special tokens too. From a store come `teacher_losses`
    instead of `teacher_ids`, NaN for a start token. Several teachers' tokens follow one another,
    `teacher_counts` of each. Steps and jumps are the spans of the text's tokens (`narrow_spans`),
    from which `alignment.align_segment` maps them where a block is read; the teachers' are left out
    where tokens are mapped by number.
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
        columns = {"document": np.int64, "student_tokens": np.int32, "teacher_tokens": np.int32}
        content = (self._column(name).astype(kind).tobytes() for name, kind in columns.items())
        return hashlib.sha256(b"".join(content)).hexdigest()[:16]

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
    format, and is read from there the next time if it is as it was written. It is made part by
    part: what a killed process has finished is kept, and machines that share the cache share the
    work, each on the parts that no other one works on. A single teacher may be given by its reader.
    """
    # Threads inside of each process would fight over the cores.
    if num_proc is not None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    guide = Teachers((teacher,)) if isinstance(teacher, Reader) else teacher or Teachers(())
    features = _features(student, guide.readers)
    # map would return it unchanged.
    if not len(corpus):
        return Segments(datasets.Dataset.from_dict({name: [] for name in features}, features), [])
    readers = f"{student.fingerprint()}|{teacher.fingerprint() if teacher else None}"
    key = f"{_FORMAT}|{corpus._fingerprint}|{readers}"
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    # Each file of a corpus has a cache of its own; all parts go to that of the first.
    sources, starts = corpus.cache_files, range(0, len(corpus), _PART)
    shared = {"student": student, "guide": guide, "schema": features.arrow_schema}
    parts: dict[int, datasets.Dataset] = {}
    # What another machine works on is waited for at the end.
    for wait, start in product((False, True), starts):
        if start in parts:
            continue
        documents = corpus.select(range(start, min(start + _PART, len(corpus))))
        fingerprint = hashlib.sha256(f"{key}|{start}|{_PART}".encode()).hexdigest()[:32]
        with suppress(Timeout), verified_cache(sources, fingerprint, wait=wait) as cache:
            parts[start] = documents.map(
                _align_batch,
                with_indices=True,
                batched=True,
                batch_size=256,
                num_proc=num_proc,
                remove_columns=corpus.column_names,
                features=features,
                fn_kwargs={"start": start, **shared},
                cache_file_name=cache,
                new_fingerprint=fingerprint,
                desc=f"Aligning documents, part {start // _PART + 1} of {len(starts)}",
            )
    rows = datasets.concatenate_datasets([parts[start] for start in starts]).with_format(None)
    is_skipped = rows.data.column("skipped").is_valid()
    if not pc.any(is_skipped).as_py():
        return Segments(rows, [])
    names = ("document", "skipped")
    columns = (rows.data.column(name).filter(is_skipped).to_pylist() for name in names)
    kept = np.flatnonzero(pc.invert(is_skipped))
    return Segments(rows.select(kept), list(zip(*columns, strict=True)))


def _align_batch(
    batch: Mapping[str, Any],
    indices: list[int],
    start: int,
    student: Reader,
    guide: Guide,
    schema: pa.Schema,
) -> pa.Table:
    """Make the rows of some documents; one that is skipped gets a single row with the reason.

    Their numbers are counted from `start`.
    """
    skipped: dict[int, str] = {}
    pieces: list[Piece] = []
    for index, text in zip((start + i for i in indices), values(batch[TEXT]), strict=True):
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
    return pa.Table.from_arrays(
        [_column([row.get(field.name) for row in rows], field.type) for field in schema],
        schema=schema,
    )


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Make a column of numbers, or of arrays, which are laid end to end once."""
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    arrays = [np.asarray(() if value is None else value) for value in values]
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    flat = np.concatenate(arrays).astype(kind.value_type.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat), type=kind)


def _features(student: Reader, teachers: Sequence[Reader]) -> datasets.Features:
    """Return the types of the columns: ids take two bytes where they fit."""
    types = dict(_ARRAYS)
    for name, readers in (("student_ids", [student]), ("teacher_ids", teachers)):
        ids = chain(*(reader.tokenizer.get_vocab().values() for reader in readers))
        if max(ids, default=0) <= np.iinfo(np.uint16).max:
            types[name] = "uint16"
    arrays = {name: datasets.List(datasets.Value(dtype)) for name, dtype in types.items()}
    numbers = dict.fromkeys(_NUMBERS, datasets.Value("int32"))
    return datasets.Features({**arrays, **numbers, "skipped": datasets.Value("string")})


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
    end = [student.end] if piece.is_last and student.end is not None else []
    counts = [1 + len(read.spans) for read in reads]
    unmapped = np.full(len(encoding.ids), not reads)
    for read in reads:
        if by_position:
            ranges = align_positions(len(encoding.ids), len(read.spans))
        else:
            ranges = align_spans(encoding.spans, read.spans)
        unmapped |= ranges[:, 0] == UNMAPPED
    student_steps, student_jumps = narrow_spans(encoding.spans)
    # The teachers' tokens follow one another in the row, each behind its own start token, which has
    # no span:
    #
    #   B a b c | B d e         counts [4, 3]
    #     0 1 2     3 4         steps
    spans = [np.zeros((0, 2), np.int64), *(read.spans for read in reads if not by_position)]
    teacher_steps, teacher_jumps = narrow_spans(np.concatenate(spans))
    return {
        "document": piece.document,
        "start": piece.start,
        "end": piece.end,
        "student_ids": np.concatenate([[student.start], encoding.ids, end]),
        "teacher_ids": [token for read in reads for token in read.ids],
        "teacher_losses": [loss for read in reads for loss in read.losses],
        "student_steps": student_steps,
        "student_jumps": student_jumps,
        "teacher_steps": teacher_steps,
        "teacher_jumps": teacher_jumps,
        "student_tokens": 1 + len(encoding.ids) + len(end),
        "teacher_tokens": sum(counts),
        "teacher_counts": counts,
        "unmapped_text_tokens": int(np.count_nonzero(unmapped)),
    }
