"""From documents to aligned segments: what both models read, and which tokens guide which.

The input is a corpus with a `text` column and one or two tokenizers. The output is a
`datasets.Dataset` with one row per segment, memory-mapped and cached. The module knows no model.

Tokens are aligned here only to count how many a teacher guides. Rows keep the spans of the tokens,
which take 7.9 bytes a token with the ids, where ranges would take 16. A packed sequence is aligned
again when it is read (`packing.as_block`), which takes a tenth of a millisecond.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from vocagnolm.alignment import narrow_spans
from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.reading import TrainOn, fit_turns, join_turns, turn_columns
from vocagnolm.conventions import TEXT, IntArray
from vocagnolm.cutting import cut_text
from vocagnolm.io import count_reasons
from vocagnolm.layout import lay_out
from vocagnolm.readers import Reader, TeacherReaders
from vocagnolm.texts import (
    column_values,
    conversations_of,
    faults_of,
    is_conversations,
    unusable,
)

# Raise it when the columns or the segmentation change: old caches must not be read.
_FORMAT = 12
# Documents that are aligned and cached together: minutes of work.
_PART = 100_000
# Why a document is skipped.
MISSING = "not in the teacher-loss store, or another text there"
# Types of the arrays of a row; ids are narrower where a vocabulary allows it.
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


def _column_types(student: Reader, teachers: TeacherReaders) -> datasets.Features:
    """Return the types of the columns of `Segments`, and of the reason why one is skipped."""
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
    features["skipped"] = datasets.Value("string")
    return datasets.Features(features)


def _id_type(readers: Sequence[Reader]) -> str:
    """Return the type of token ids: two bytes, where the vocabularies allow it."""
    largest = 0
    for reader in readers:
        largest = max(largest, max(reader.tokenizer.get_vocab().values(), default=0))
    return "uint16" if largest <= np.iinfo(np.uint16).max else "int32"


def _as_table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    """Make a table of columns as `lay_out` has them; others are zero, empty or null."""
    rows = len(columns["document"])
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        if pa.types.is_list(kind):
            # Edges that are all 0 make every row an empty list.
            edges, flat = columns.get(name, (np.zeros(rows + 1), np.empty(0)))
            # Arrow takes the NumPy array as it is, so that there is no Python object for a token.
            values = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False))
            array = pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), values, type=kind)
        else:
            absent = [None] * rows if pa.types.is_string(kind) else np.zeros(rows, np.int32)
            array = pa.array(columns.get(name, absent), kind)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=schema)


# -- Segments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The aligned segments of a corpus, a row for each, ordered by document and position.

    `student_ids` and `teacher_ids` hold the special tokens too. From a store come `teacher_losses`
    instead of `teacher_ids`, NaN for a start token. Several teachers' tokens are concatenated,
    `teacher_counts` of each. Codes and exceptions are the spans of the text's tokens
    (`narrow_spans`); the teachers' are left out where tokens are mapped by index. Of a
    conversation, which is a segment, half-open ranges of tokens are labelled; no ranges stand for
    all tokens, as of a document. Without a teacher there are no columns of its tokens.
    """

    rows: datasets.Dataset
    # (document, reason) of each document that has no segment.
    skipped: list[tuple[int, str]]

    def _column(self, name: str) -> IntArray:
        return np.asarray(self.rows.with_format("numpy")[name][:])

    def total(self, column: str) -> int:
        """Return the sum of an integer column."""
        return int(self._column(column).sum())

    def split(self, fraction: float, seed: int) -> tuple[Segments, Segments]:
        """Hold out a share of the documents: (the rest, the held-out ones)."""
        # Whole documents are held out, so that no text is judged whose beginning was trained on.
        documents = self._column("document")
        distinct = np.unique(documents)
        # The product is rounded first, because 0.07 * 100 is a little more than 7 in floats.
        count = math.ceil(round(fraction * len(distinct), 6))
        held_out = np.random.default_rng(seed).permutation(distinct)[:count]
        is_held_out = np.isin(documents, held_out)
        remaining_rows = self.rows.select(np.flatnonzero(~is_held_out))
        held_out_rows = self.rows.select(np.flatnonzero(is_held_out))
        return Segments(remaining_rows, self.skipped), Segments(held_out_rows, [])

    def digest(self) -> str:
        """Name the corpus by the lengths of all segments in order: another corpus has another."""
        # The integer types are fixed, so that the digest does not depend on how a cache is typed.
        sha256 = hashlib.sha256(self._column("document").astype(np.int64).tobytes())
        sha256.update(self._column("student_tokens").astype(np.int32).tobytes())
        sha256.update(self._column("teacher_tokens").astype(np.int32).tobytes())
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
    """Cut every document into segments that both readers can hold, and align the two encodings.

    The result is cached next to the corpus under a fingerprint of the corpus, both readers and the
    format, part by part: what a killed process has finished is kept, and machines that share the
    cache work on different parts. A single teacher may be given by its reader. Conversations are
    not cut, and `train_on` says which of their tokens have labels.
    """
    # Threads inside of each process would fight over the cores.
    if num_proc is not None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(teacher, Reader):
        teacher = TeacherReaders((teacher,))
    teachers = teacher or TeacherReaders()
    features = _column_types(student, teachers)
    if not len(corpus):
        # `map` would return it unchanged.
        no_rows: dict[str, list[object]] = {name: [] for name in features}
        return Segments(datasets.Dataset.from_dict(no_rows, features), [])
    # Everything that decides the rows must be in the key, or a run would read another's cache.
    readers = f"{student.fingerprint()}|{teacher.fingerprint() if teacher else None}"
    key = f"{_FORMAT}|{corpus._fingerprint}|{readers}"
    is_turns = is_conversations(corpus)
    if is_turns:
        if teachers.by_position:
            raise ValueError("--uld_pairing position does not support conversations: use last")
        teachers.check_templates(student)
        templates = []
        for reader in (student,) + teachers.readers:
            templates.append(reader.template)
        key += f"|{templates}|{train_on}"
    # Texts come as Arrow arrays. As Python strings the library would fail on a whole batch if one
    # text in it is not valid UTF-8.
    corpus = corpus.with_format("arrow")
    aligner = _Aligner(student, teachers, features.arrow_schema, train_on if is_turns else None)
    rows = _align_parts(corpus, aligner, key, features, num_proc)
    # A row of a skipped document holds nothing but the reason. Reasons are read by Arrow, which
    # touches two columns only, and the rows are left out by index, which copies nothing.
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
    """Make the rows of a corpus part by part, each in a cache of its own, and join them."""
    starts = range(0, len(corpus), _PART)
    parts: dict[int, datasets.Dataset] = {}
    # A part that another process is making is passed over, and read at the end, when it is made.
    # The first round does not wait for a lock, and the second one waits as long as it takes.
    for timeout, start in itertools.product((0, -1), starts):
        if start in parts:
            continue
        documents = corpus.select(range(start, min(start + _PART, len(corpus))))
        fingerprint = hashlib.sha256(f"{key}|{start}|{_PART}".encode()).hexdigest()[:32]
        # Next to the first file of the corpus; one in memory has no file, and no cache.
        cache = None
        if corpus.cache_files:
            first_file = Path(corpus.cache_files[0]["filename"])
            cache = str(first_file.with_name(f"cache-{fingerprint}.arrow"))
        lock = FileLock(f"{cache}.lock", timeout=timeout) if cache else nullcontext()
        # `map` writes a temporary file and renames it at the end, so that a killed process leaves
        # no half of a part; the system drops its lock. Whoever comes next finds the file and maps
        # it into memory instead of making it again.
        with suppress(Timeout), lock:
            parts[start] = documents.map(
                aligner.align_batch,
                with_indices=True,
                batched=True,
                # A tokenizer holds some 250 times as much as the texts that it reads.
                batch_size=64,
                num_proc=num_proc,
                remove_columns=corpus.column_names,
                features=features,
                fn_kwargs={"start": start},
                cache_file_name=cache,
                new_fingerprint=fingerprint,
                desc=f"Aligning documents, part {start // _PART + 1} of {len(starts)}",
            )
    # The parts may be finished in any order, and are joined in the order of the documents.
    in_order = [parts[start] for start in starts]
    return datasets.concatenate_datasets(in_order).with_format(None)


@dataclass(frozen=True)
class _Aligner:
    """Makes the rows of documents, or of conversations where `train_on` is given."""

    student: Reader
    teachers: TeacherReaders
    schema: pa.Schema
    train_on: TrainOn | None

    def align_batch(self, batch: Mapping[str, Any], indices: list[int], start: int) -> pa.Table:
        """Make the rows of some documents; one that is skipped gets a single row with the reason.

        `start` is the index of the part's first document.
        """
        # `map` counts within the part; rows name a document by its index in the corpus.
        documents = [start + index for index in indices]
        if self.train_on:
            conversations, skipped = conversations_of(batch, documents)
            rows = self._turns(conversations, skipped, self.train_on)
        else:
            usable, skipped = self._usable_texts(batch, documents)
            rows = self._texts(usable, skipped)
        if not skipped:
            return rows
        reasons = {"document": np.array(list(skipped)), "skipped": list(skipped.values())}
        all_rows = pa.concat_tables([rows, _as_table(reasons, self.schema)])
        # Readers rely on rows in the order of the corpus, so the reasons go between the others.
        return all_rows.sort_by([("document", "ascending"), ("start", "ascending")])

    @staticmethod
    def _usable_texts(
        batch: Mapping[str, Any], documents: list[int]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Return the texts of a batch by index, and the reasons why others cannot be used."""
        usable = {}
        skipped = {}
        faults = faults_of(batch, documents)
        for index, text in zip(documents, column_values(batch[TEXT]), strict=True):
            reason = faults.get(index) or unusable(text)
            if reason:
                skipped[index] = reason
            else:
                usable[index] = text
        return usable, skipped

    def _texts(self, texts: Mapping[int, str], skipped: dict[int, str]) -> pa.Table:
        """Make the rows of texts by index; add those that have none to `skipped`."""
        documents = list(texts)
        contents = list(texts.values())
        try:
            student_tokens = self.student.read(contents)
            teacher_tokens, lacking = self.teachers.read(contents)
        except ValueError as error:
            # One document of many is at fault. Each is read alone, so that only that one is
            # skipped.
            if len(texts) > 1:
                tables = []
                for index, content in texts.items():
                    tables.append(self._texts({index: content}, skipped))
                return pa.concat_tables(tables)
            skipped.update(dict.fromkeys(texts, str(error)))
            return self.schema.empty_table()
        limits = self._limits(self.student.text_limit)
        models = [student_tokens]
        models += teacher_tokens
        # The rows of `counts` are models, and its columns are texts.
        counts = np.stack([np.diff(model.edges) for model in models])
        is_read = counts > 0
        is_within = counts <= np.array(limits)[:, None]
        fits = np.array((is_read & is_within).all(axis=0))
        # A text that teachers lack is looked at by itself, even where the student's tokens fit.
        fits[list(lacking)] = False
        # Parts are (text, start, end), and a text that fits is one part.
        parts = []
        for text in np.flatnonzero(fits).tolist():
            parts.append((text, 0, len(contents[text])))
        # The others have more tokens of a model than its limit, or none.
        for text in np.flatnonzero(~fits).tolist():
            reason = lacking.get(text)
            if reason:
                skipped[documents[text]] = reason
                continue
            spans = [model.encoding(text).spans for model in models]
            if text in lacking:
                # Without a teacher it is cut for the student alone.
                spans = spans[:1]
            edges = cut_text(contents[text], spans, limits[: len(spans)])
            if isinstance(edges, str):
                skipped[documents[text]] = edges
            else:
                for start, end in pairwise(edges):
                    parts.append((text, start, end))
        # Rows are sorted by text and start, so those of a text are together and in its order. The
        # shape is given because an array of no parts would have one dimension.
        segments = np.array(sorted(parts), np.int64).reshape(-1, 3)
        lengths = np.fromiter(map(len, contents), np.int64, len(contents))
        by_position = self.teachers.by_position
        columns = lay_out(segments, lengths, student_tokens, teacher_tokens, by_position)
        # A segment knows the place of its text in this batch, and a row needs the index of the
        # document in the corpus.
        columns["document"] = np.array(documents, np.int64)[segments[:, 0]]
        return self._table(columns)

    def _limits(self, student_limit: int) -> list[int]:
        """Return the most tokens of a text for each model, the tokens around it taken off."""
        limits = [student_limit]
        # A teacher's limit counts the start token.
        limits += [limit - 1 for limit in self.teachers.limits()]
        return limits

    def _turns(
        self, conversations: Mapping[int, Conversation], skipped: dict[int, str], train_on: TrainOn
    ) -> pa.Table:
        """Make a row of each conversation, ended after an answer; add the others to `skipped`."""
        contents = list(conversations.values())
        models = [self.student.read_turns(contents, train_on)]
        models += self.teachers.read_turns(contents, train_on)
        # The template writes the end of a conversation, so only the first token is taken off.
        limits = self._limits(self.student.limit - 1)
        fitted = []
        for number, (document, conversation) in enumerate(conversations.items()):
            # All models must keep the same messages, so what they read is judged together.
            turns = fit_turns(document, conversation, [model[number] for model in models], limits)
            if isinstance(turns, str):
                skipped[document] = turns
            else:
                fitted.append(turns)
        # A conversation is one segment, from its first character to the end of the last answer.
        lengths = np.array([turns.end for turns in fitted], np.int64)
        segments = np.stack([np.arange(len(lengths)), 0 * lengths, lengths], axis=1)
        # `fitted` goes by conversation, and `lay_out` takes one `Tokens` for each model.
        tokens = []
        for model in range(len(models)):
            tokens.append(join_turns([turns.reads[model] for turns in fitted]))
        columns = lay_out(segments, lengths, tokens[0], tokens[1:])
        return self._table(columns | turn_columns(fitted))

    def _table(self, columns: dict[str, Any]) -> pa.Table:
        """Make a table of columns; spans are written in few bytes."""
        # Where tokens are mapped by index, a teacher's spans are not needed.
        sides = ["student"] if self.teachers.by_position else ["student", "teacher"]
        for side in sides:
            if f"{side}_spans" not in columns:
                continue
            edges, spans = columns.pop(f"{side}_spans")
            # There is a code for each span, so codes have the edges of the spans; exceptions are
            # few and have edges of their own.
            codes, exceptions, exception_edges = narrow_spans(spans, edges)
            columns[f"{side}_codes"] = edges, codes
            columns[f"{side}_exceptions"] = exception_edges, exceptions
        return _as_table(columns, self.schema)


def skip_reasons(segments: Segments) -> str:
    """Return the three most frequent reasons for leaving a document out, with counts."""
    return count_reasons(reason for _, reason in segments.skipped)


def skipped_line(segments: Segments, documents: int) -> str:
    """Say how many documents were skipped, and why."""
    count = len(segments.skipped)
    return f"{count:,} of {documents:,} documents were skipped: {skip_reasons(segments)}"
