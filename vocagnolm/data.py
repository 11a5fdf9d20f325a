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
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from filelock import Timeout

from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.host.cache import verified_cache
from vocagnolm.segmentation import Segmentation, cut_documents, lay_out
from vocagnolm.tokenizers import Guide, Reader, Teachers

# Raise it when the columns or the segmentation change: old caches must not be read.
_FORMAT = 7
# Documents that are aligned, cached and checked together: minutes of work.
_PART = 100_000
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
    found = dict(zip((start + i for i in indices), values(batch[TEXT]), strict=True))
    skipped = {index: why for index, text in found.items() if (why := unusable(text))}
    texts = {index: text for index, text in found.items() if index not in skipped}
    rows = _align(texts, skipped, student, guide, schema)
    if not skipped:
        return rows
    nothing = {field.name: [] for field in schema if pa.types.is_list(field.type)}
    reasons = [{**nothing, "document": i, "start": 0, "skipped": why} for i, why in skipped.items()]
    both = pa.concat_tables([rows, pa.Table.from_pylist(reasons, schema)])
    return both.sort_by([("document", "ascending"), ("start", "ascending")])


def _align(
    texts: Mapping[int, str],
    skipped: dict[int, str],
    student: Reader,
    guide: Guide,
    schema: pa.Schema,
) -> pa.Table:
    """Make the rows of texts by their numbers; add those that cannot be aligned to `skipped`."""
    try:
        ours, read = student.read([*texts.values()]), guide.read([*texts.values()])
    except ValueError as error:
        # One document of many is at fault: read alone, it alone is skipped.
        if len(texts) > 1:
            alone = ({number: text} for number, text in texts.items())
            return pa.concat_tables(_align(one, skipped, student, guide, schema) for one in alone)
        skipped.update(dict.fromkeys(texts, str(error)))
        return schema.empty_table()
    # A teacher's limit counts the start token.
    limits = [student.text_limit, *(limit - 1 for limit in guide.limits())]
    cuts, reasons = cut_documents([*texts.values()], [ours, *read.teachers], limits, read.cuts)
    numbers = np.array([*texts], np.int64)
    skipped.update((int(numbers[text]), why) for text, why in reasons.items())
    lengths = np.fromiter(map(len, texts.values()), np.int64, len(texts))
    segments = Segmentation.of(lengths, cuts, reasons)
    columns = lay_out(segments, ours, read.teachers, guide.by_position)
    columns["document"] = numbers[segments.documents]
    arrays = [
        _column(columns.get(field.name), field.type, len(segments.starts)) for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _column(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    """Make a column of numbers, or of arrays laid end to end; of nothing without values."""
    if not pa.types.is_list(kind):
        return pa.nulls(rows, kind) if values is None else pa.array(values, kind)
    edges, flat = (np.zeros(rows + 1), np.empty(0)) if values is None else values
    content = pa.array(flat.astype(kind.value_type.to_pandas_dtype(), copy=False))
    return pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), content, type=kind)


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
