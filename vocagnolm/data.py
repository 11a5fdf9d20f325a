"""From documents to aligned segments: what both models read, and which tokens guide which.

The input is a corpus with a `text` column and one or two tokenizers. The output is a
`datasets.Dataset` with one row per segment, memory-mapped and cached. The module knows no model.

Here, tokens are aligned only to count how many have a teacher token. Rows keep the spans of the
tokens, which with the ids take 7.9 bytes a token. Ranges would take 16. A packed sequence is
aligned again when it is read (`packing.as_block`), in a tenth of a millisecond.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from vocagnolm.alignment import narrow_spans
from vocagnolm.chat.formats import WEIGHT, Conversation
from vocagnolm.chat.reading import TrainOn, fit_turns, join_turns, turn_columns
from vocagnolm.conventions import IntArray
from vocagnolm.cutting import cut_text
from vocagnolm.fields import OptionError
from vocagnolm.layout import lay_out
from vocagnolm.readers import Reader, TeacherReaders, WithoutTeacher, each_alone
from vocagnolm.shell.io import count_reasons
from vocagnolm.spans import Tokens
from vocagnolm.texts import WEIGHTS, is_conversations, usable_in

# Raise it when the columns or the segmentation change, so that old caches are not read.
_FORMAT = 15
# Documents that are aligned and cached together: a few minutes of work.
_PART = 100_000
# The reason for skipping a document.
MISSING = "not in the teacher-loss store, or another text there"
_WEIGHTS = "student_weights"
# Exists only if the corpus brings weights.
_WEIGHT_COLUMN = {_WEIGHTS: datasets.List(datasets.Value("float32"))}
# Types of the arrays of a row. Ids use fewer bytes if the vocabulary allows it.
_ARRAYS = {
    "student_ids": "int32",
    "teacher_ids": "int32",
    "teacher_counts": "int32",
    "teacher_losses": "float32",
    "student_codes": "uint8",
    "teacher_codes": "uint8",
    "student_exceptions": "int32",
    "teacher_exceptions": "int32",
    "student_labelled": "int32",
    "teacher_labelled": "int32",
}
_INTEGERS = (
    "document",
    "start",
    "end",
    "student_tokens",
    "teacher_tokens",
    "text_tokens",
    "unmapped_text_tokens",
    "left_out_messages",
    "trimmed_characters",
)


def _column_types(student: Reader, teachers: TeacherReaders, weighted: bool) -> datasets.Features:
    """Return the types of the columns of `Segments`, and of the reason for skipping a document."""
    features = {}
    for name, dtype in _ARRAYS.items():
        if name.startswith("teacher_") and not teachers.limits():
            continue
        if name == "student_ids":
            dtype = _id_type([student])
        elif name == "teacher_ids":
            dtype = _id_type(teachers.readers)
        features[name] = datasets.List(datasets.Value(dtype))
    for name in _INTEGERS:
        features[name] = datasets.Value("int32")
    features["student_crc32"] = datasets.Value("uint32")
    features["skipped"] = datasets.Value("string")
    return datasets.Features(features | (_WEIGHT_COLUMN if weighted else {}))


def _id_type(readers: Sequence[Reader]) -> str:
    """Return the type of token ids: two bytes if the vocabularies are small enough."""
    largest = 0
    for reader in readers:
        largest = max(largest, max(reader.tokenizer.get_vocab().values(), default=0))
    return "uint16" if largest <= np.iinfo(np.uint16).max else "int32"


def _as_table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Make a table of the columns that `lay_out` returns. Other columns are zero, empty or null."""
    rows = len(columns["document"])
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        if pa.types.is_list(kind):
            # Edges that are all 0 make every row an empty list.
            edges, flat = columns.get(name, (np.zeros(rows + 1), np.empty(0)))
            # Arrow takes the NumPy array as it is, without a Python object for each token.
            values = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False))
            array = pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), values, type=kind)
        else:
            absent = [None] * rows if pa.types.is_string(kind) else np.zeros(rows, np.int32)
            array = pa.array(columns.get(name, absent), kind)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


def _with_weights(rows: pa.Table, weights: Mapping[int, float]) -> pa.Table:
    """Give the segments of each document its weight."""
    values = []
    for document in rows["document"].to_pylist():
        values.append(weights[document])
    one_each = np.arange(len(values) + 1, dtype=np.int32)
    column = pa.ListArray.from_arrays(one_each, pa.array(values, pa.float32()))
    index = rows.column_names.index(_WEIGHTS)
    return rows.set_column(index, rows.schema.field(index), column)


# -- Segments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The aligned segments of a corpus, one row each, ordered by document and position.

    `student_ids` and `teacher_ids` include the special tokens. A store gives `teacher_losses`
    instead of `teacher_ids`, with NaN for start tokens. The tokens of several teachers are
    concatenated, and `teacher_counts` has the number of each. Codes and exceptions are the spans of
    the text's tokens (`narrow_spans`). If tokens are mapped by index, the teachers' are left out. A
    conversation is one segment, with half-open ranges of labelled tokens. No ranges mean that all
    tokens have labels, as in a document. Without a teacher there are no columns of teacher tokens.

    `student_weights` exists only if the corpus brings weights. It has one for each labelled range,
    or one for a whole document; none means that all are 1.
    """

    rows: datasets.Dataset
    # (document, reason) of each document without a segment.
    skipped: list[tuple[int, str]]

    def _column(self, name: str) -> IntArray:
        return np.asarray(self.rows.with_format("numpy")[name][:])

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """The weights of all documents' segments and labelled ranges, if the corpus has any."""
        if _WEIGHTS not in self.rows.column_names:
            return np.empty(0, np.float32)
        return np.asarray(pc.list_flatten(self.rows.with_format("arrow")[_WEIGHTS][:]), np.float32)

    def with_weights(self) -> datasets.Dataset:
        """Return rows that have a column of weights, to join them with those of other corpora."""
        if _WEIGHTS in self.rows.column_names:
            return self.rows
        # An empty list stands for 1. Left to `datasets`, it would be null.
        empty: Any = [[]] * len(self.rows)
        return self.rows.add_column(_WEIGHTS, empty, feature=_WEIGHT_COLUMN[_WEIGHTS])

    def describe_weights(self) -> str:
        """Say what the weights of a corpus that brings some are like."""
        weights = self.weights
        return (
            f"column weight: {(weights != 1).mean():.1%} of {len(weights):,} are not 1, smallest "
            f"{weights.min():.4g}, largest {weights.max():.4g}, mean {weights.mean():.4g}"
        )

    def total(self, column: str) -> int:
        """Return the sum of an integer column."""
        return int(self._column(column).sum())

    def split(self, fraction: float, seed: int) -> tuple[Segments, Segments]:
        """Hold out a share of the documents. Returns the rest and the held-out ones."""
        # Hold out whole documents, so that no text is evaluated whose beginning was trained on.
        documents = self._column("document")
        distinct = np.unique(documents)
        # Round the product first, because 0.07 * 100 is slightly more than 7 in floats.
        count = math.ceil(round(fraction * len(distinct), 6))
        held_out = np.random.default_rng(seed).permutation(distinct)[:count]
        is_held_out = np.isin(documents, held_out)
        remaining_rows = self.rows.select(np.flatnonzero(~is_held_out))
        held_out_rows = self.rows.select(np.flatnonzero(is_held_out))
        return Segments(remaining_rows, self.skipped), Segments(held_out_rows, [])

    def count_documents(self) -> int:
        """Count the documents that have a segment."""
        return len(np.unique(self._column("document")))

    def digest(self) -> str:
        """Identify the corpus by the lengths and the student's tokens of all segments in order."""
        # The integer types are fixed, so the digest does not depend on the types in a cache.
        sha256 = hashlib.sha256(self._column("document").astype(np.int64).tobytes())
        sha256.update(self._column("student_tokens").astype(np.int32).tobytes())
        sha256.update(self._column("teacher_tokens").astype(np.int32).tobytes())
        # Reading all tokens again would take minutes, so each segment has a checksum.
        sha256.update(self._column("student_crc32").astype(np.uint32).tobytes())
        # Without weights, this changes nothing.
        sha256.update(self.weights.tobytes())
        return sha256.hexdigest()[:16]

    @property
    def reasons(self) -> list[tuple[int, str]]:
        """The documents that were left out, and the conversations whose last messages were."""
        documents = self._column("document")
        left_out = self._column("left_out_messages")
        reasons = list(self.skipped)
        for row in np.flatnonzero(left_out):
            reason = f"exceeds a context: its last {left_out[row]} messages are left out"
            reasons.append((int(documents[row]), reason))
        return reasons

    @property
    def mapped_text_fraction(self) -> float:
        """The share of the student's text tokens that have a teacher range, in [0, 1]."""
        return 1.0 - self.total("unmapped_text_tokens") / max(self.total("text_tokens"), 1)


def align_corpus(
    corpus: datasets.Dataset,
    student: Reader,
    teacher: Reader | TeacherReaders | None,
    *,
    num_proc: int | None = None,
    train_on: TrainOn = "completions",
) -> Segments:
    """Cut every document into segments that fit all readers, and align their tokens.

    The result is cached next to the corpus, under a hash of the documents, the readers and the
    format. It is cached in parts, so finished parts survive a crash, and machines that share the
    cache work on different parts. A single teacher may be given as a `Reader`. Conversations are
    not cut, and `train_on` says which of their tokens have labels.
    """
    # Threads in every process would compete for the cores.
    if num_proc is not None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(teacher, Reader):
        teacher = TeacherReaders((teacher,))
    teachers = teacher or TeacherReaders()
    weighted = not {WEIGHT, WEIGHTS}.isdisjoint(corpus.column_names)
    features = _column_types(student, teachers, weighted)
    if not len(corpus):
        # `map` would return an empty corpus unchanged.
        no_rows: dict[str, list[object]] = {name: [] for name in features}
        return Segments(datasets.Dataset.from_dict(no_rows, features), [])
    # Besides the documents, everything that determines the rows must be in the key, or a run would
    # read another's cache.
    key = f"{_FORMAT}|{student.fingerprint()}|{teachers.fingerprint()}"
    is_turns = is_conversations(corpus)
    if is_turns:
        if teachers.by_position:
            raise OptionError("uld_pairing", "position does not support conversations: use last")
        teachers.check_templates(student)
        templates = []
        for reader in (student,) + teachers.readers:
            templates.append(reader.template)
        key += f"|{templates}|{train_on}"
    # Get texts as Arrow arrays. As Python strings, one text with invalid UTF-8 would make the
    # library fail on its whole batch.
    corpus = corpus.with_format("arrow")
    aligner = _Aligner(student, teachers, features.arrow_schema, train_on if is_turns else None)
    rows = _align_parts(corpus, aligner, key, features, num_proc)
    # The row of a skipped document holds only the reason. Arrow reads the reasons from two columns,
    # and the rows are dropped by index, without a copy.
    is_skipped = rows.data.column("skipped").is_valid()
    documents = rows.data.column("document").filter(is_skipped).to_pylist()
    reasons = rows.data.column("skipped").filter(is_skipped).to_pylist()
    used_rows = np.flatnonzero(pc.invert(is_skipped))
    return Segments(rows.select(used_rows), list(zip(documents, reasons, strict=True)))


def _align_parts(
    corpus: datasets.Dataset,
    aligner: _Aligner,
    key: str,
    features: datasets.Features,
    num_proc: int | None,
) -> datasets.Dataset:
    """Make the rows of a corpus in parts, each with its own cache, and join them."""
    starts = range(0, len(corpus), _PART)
    parts: dict[int, datasets.Dataset] = {}
    # Skip a part that another process is making, and read it at the end. The first round does not
    # wait for locks, and the second one does.
    for timeout, start in itertools.product((0, -1), starts):
        if start in parts:
            continue
        documents = corpus.select(range(start, min(start + _PART, len(corpus))))
        fingerprint = _hash_documents(documents, f"{key}|{start}|{_PART}")
        # The cache is next to the corpus's first file. A corpus in memory has no file, and no
        # cache.
        cache = None
        if corpus.cache_files:
            first_file = Path(corpus.cache_files[0]["filename"])
            cache = str(first_file.with_name(f"cache-{fingerprint}.arrow"))
        lock = FileLock(f"{cache}.lock", timeout=timeout) if cache else nullcontext()
        # `map` writes a temporary file and renames it at the end, so a killed process leaves no
        # partial file, and the system releases its lock. The next process that needs the part finds
        # the file and maps it into memory.
        with suppress(Timeout), lock:
            parts[start] = documents.map(
                aligner.align_batch,
                with_indices=True,
                batched=True,
                # A tokenizer needs about 250 times the memory of the texts that it reads.
                batch_size=64,
                num_proc=num_proc,
                remove_columns=corpus.column_names,
                features=features,
                fn_kwargs={"start": start},
                cache_file_name=cache,
                new_fingerprint=fingerprint,
                desc=f"Aligning documents, part {start // _PART + 1} of {len(starts)}",
            )
    # Parts may be finished in any order, and are joined in the order of the documents.
    in_order = [parts[start] for start in starts]
    return datasets.concatenate_datasets(in_order).with_format(None)


def _hash_documents(documents: datasets.Dataset, key: str) -> str:
    """Hash a key and the rows of documents, which takes a second for about 1 GB."""
    sha256 = hashlib.sha256(key.encode())
    # A few rows at a time, because others than adjacent ones are copied.
    for table in documents.iter(1000):
        for batch in table.combine_chunks().to_batches():
            sha256.update(batch.serialize())
    return sha256.hexdigest()[:32]


# Documents by index, their texts, the tokens of the student and of every teacher, and the documents
# that teachers lack.
_Reading = tuple[list[int], list[str], Tokens, list[Tokens], WithoutTeacher]


@dataclass(frozen=True)
class _Aligner:
    """Makes the rows of documents, or of conversations if `train_on` is given."""

    student: Reader
    teachers: TeacherReaders
    schema: pa.Schema
    train_on: TrainOn | None

    def align_batch(self, batch: pa.Table, indices: list[int], start: int) -> pa.Table:
        """Make the rows of some documents. A skipped document gets one row with the reason.

        `start` is the index of the part's first document.
        """
        # `map` counts within the part, but rows use the index in the corpus.
        documents = [start + index for index in indices]
        usable, skipped = usable_in(batch, documents)
        if self.train_on:
            rows = self._turns(usable, skipped, self.train_on)
        else:
            rows = self._texts(usable, skipped)
        if WEIGHT in batch.column_names:
            weights = dict(zip(documents, batch[WEIGHT].fill_null(1.0).to_pylist(), strict=True))
            rows = _with_weights(rows, weights)
        if not skipped:
            return rows
        reasons = {"document": np.array(list(skipped)), "skipped": list(skipped.values())}
        all_rows = pa.concat_tables([rows, _as_table(reasons, self.schema)])
        # Readers rely on rows in the order of the corpus, so sort the reasons in.
        return all_rows.sort_by([("document", "ascending"), ("start", "ascending")])

    def _texts(self, texts: Mapping[int, str], skipped: dict[int, str]) -> pa.Table:
        """Make the rows of texts by index. Texts without rows are added to `skipped`."""

        def failed(document: int, error: ValueError) -> None:
            skipped[document] = str(error)

        readings = each_alone(lambda items: [self._read(texts, items)], list(texts), failed)
        tables = [self.schema.empty_table()]
        for reading in readings:
            if reading:
                tables.append(self._segments(reading, skipped))
        return pa.concat_tables(tables)

    def _read(self, texts: Mapping[int, str], documents: list[int]) -> _Reading | None:
        """Read some of the texts with all models, or raise a ValueError for one of them."""
        contents = [texts[document] for document in documents]
        teacher_tokens, without_teacher = self.teachers.read(contents)
        return documents, contents, self.student.read(contents), teacher_tokens, without_teacher

    def _segments(self, reading: _Reading, skipped: dict[int, str]) -> pa.Table:
        """Cut documents whose tokens are known. Documents without rows are added to `skipped`."""
        documents, contents, student_tokens, teacher_tokens, without_teacher = reading
        limits = [self.student.text_limit]
        # A teacher's limit includes the start token.
        limits += [limit - 1 for limit in self.teachers.limits()]
        models = [student_tokens]
        models += teacher_tokens
        # Rows of `counts` are models, and columns are texts.
        counts = np.stack([np.diff(model.edges) for model in models])
        is_read = counts > 0
        is_within = counts <= np.array(limits)[:, None]
        fits = np.array((is_read & is_within).all(axis=0))
        # A text that the teachers lack is cut by itself, even if the student's tokens fit.
        fits[list(without_teacher)] = False
        # Parts are (text, start, end). A text that fits is one part.
        parts = []
        for text in np.flatnonzero(fits).tolist():
            parts.append((text, 0, len(contents[text])))
        # The other texts have too many tokens for a model, or none.
        for text in np.flatnonzero(~fits).tolist():
            reason = without_teacher.get(text)
            if reason:
                skipped[documents[text]] = reason
                continue
            spans = [model.encoding(text).spans for model in models]
            if text in without_teacher:
                # Without a teacher, only the student limits the cut.
                spans = spans[:1]
            edges = cut_text(contents[text], spans, limits[: len(spans)])
            if isinstance(edges, str):
                skipped[documents[text]] = edges
            else:
                for start, end in pairwise(edges):
                    parts.append((text, start, end))
        # Sort rows by text and start, so that the parts of a text are together and in order. The
        # shape is given because an array without parts would have one dimension.
        segments = np.array(sorted(parts), np.int64).reshape(-1, 3)
        lengths = np.fromiter(map(len, contents), np.int64, len(contents))
        by_position = self.teachers.by_position
        columns = lay_out(segments, lengths, student_tokens, teacher_tokens, by_position)
        # Segments know the index of their text in this batch, and rows need its index in the
        # corpus.
        columns["document"] = np.array(documents, np.int64)[segments[:, 0]]
        return self._table(columns)

    def _turns(
        self, conversations: Mapping[int, Conversation], skipped: dict[int, str], train_on: TrainOn
    ) -> pa.Table:
        """Make one row for each conversation, up to an answer. Others are added to `skipped`."""
        contents = list(conversations.values())
        models = [self.student.read_turns(contents, train_on)]
        models += self.teachers.read_turns(contents, train_on)
        # The template writes the end of a conversation, so only the start tokens are subtracted.
        limits = [limit - 1 for limit in [self.student.limit] + self.teachers.limits()]
        fitted = []
        for number, (document, conversation) in enumerate(conversations.items()):
            # All models must keep the same messages, so they are fitted together.
            turns = fit_turns(document, conversation, [model[number] for model in models], limits)
            if isinstance(turns, str):
                skipped[document] = turns
            else:
                fitted.append(turns)
        # A conversation is one segment, from its first character to the end of its last answer.
        lengths = np.array([turns.end for turns in fitted], np.int64)
        segments = np.stack([np.arange(len(lengths)), 0 * lengths, lengths], axis=1)
        # `fitted` has a row for each conversation, but `lay_out` takes `Tokens` for each model.
        tokens = []
        for model in range(len(models)):
            tokens.append(join_turns([turns.reads[model] for turns in fitted]))
        columns = lay_out(segments, lengths, tokens[0], tokens[1:])
        return self._table(columns | turn_columns(fitted))

    def _table(self, columns: dict[str, Any]) -> pa.Table:
        """Make a table of columns, with spans stored in few bytes."""
        # If tokens are mapped by index, a teacher's spans are not needed.
        sides = ["student"] if self.teachers.by_position else ["student", "teacher"]
        for side in sides:
            if f"{side}_spans" not in columns:
                continue
            edges, spans = columns.pop(f"{side}_spans")
            # Each span has one code, so codes have the edges of the spans. Exceptions are few and
            # have their own edges.
            codes, exceptions, exception_edges = narrow_spans(spans, edges)
            columns[f"{side}_codes"] = edges, codes
            columns[f"{side}_exceptions"] = exception_edges, exceptions
        edges, ids = columns["student_ids"]
        # The integer type is fixed, so that a checksum does not depend on the type in the cache.
        ids = ids.astype(np.int32)
        checksums = [zlib.crc32(ids[start:end]) for start, end in pairwise(edges)]
        columns["student_crc32"] = np.array(checksums, np.uint32)
        return _as_table(columns, self.schema)


def skip_reasons(segments: Segments) -> str:
    """Return the three most frequent reasons for skipping a document, with counts."""
    return count_reasons(reason for _, reason in segments.skipped)
