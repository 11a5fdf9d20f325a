"""The one way from documents to packed sequences: aligned, with a word about skipped ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.data import MISSING, Segments, align_corpus, skip_reasons
from vocagnolm.fields import OptionError, named
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders
from vocagnolm.shell.dist import cores
from vocagnolm.shell.io import explain_full_disk, log_main
from vocagnolm.training.options import PackOptions

# With fewer documents, processes take longer to start than they save on 32 cores.
_MANY_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Packed:
    """Packed sequences to train and evaluate on, and the documents that they were made of.

    Attributes:
        blocks, eval_blocks: packed sequences; of several evaluations a dict by name.
        texts: the documents of each corpus that were read, by its name. Python may give packed
            sequences, whose documents are not known.
        parts: the aligned segments of each corpus.
        segments: those of all corpora. Documents are numbered through all of them.
        totals: documents of each corpus, which may be more than were read; None if unknown.
        skipped: documents without a sequence, with the reasons, by the file that lists them.
        files: which files of directories were read, and which were not.
    """

    blocks: Any
    eval_blocks: Any = None
    texts: Mapping[str, datasets.Dataset] = field(default_factory=dict)
    parts: Sequence[Segments] = ()
    segments: Segments | None = None
    totals: Sequence[int | None] = ()
    skipped: Mapping[str, list[tuple[int, str]]] = field(default_factory=dict)
    files: Sequence[str] = ()

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a corpus were read."""
        # An unknown total equals no length, so the corpus counts as a sample.
        read = [len(texts) for texts in self.texts.values()]
        return read == list(self.totals)

    def expected_sequences(self) -> list[float] | None:
        """Extrapolate the sequences of each whole corpus, or return None if its size is unknown."""
        sizes = []
        sequences = self.blocks.parts.values()
        for count, texts, total in zip(sequences, self.texts.values(), self.totals, strict=True):
            if total is None:
                return None
            # The first documents stand for all, so sequences grow in proportion to documents.
            sizes.append(count * total / len(texts))
        return sizes


def pack_corpora(
    texts: Mapping[str, datasets.Dataset],
    student: Reader,
    teachers: TeacherReaders | None,
    options: PackOptions,
    argument: str,
    *,
    held_out: float = 0.0,
    seed: int = 0,
) -> Packed:
    """Align the documents of each corpus, and pack them: the one way for all callers.

    `argument` is what names the corpora in messages. A share of each corpus may be held out for an
    evaluation.

    Raises:
        ValueError: a corpus has no usable document, or a store lacks some.
    """
    aligned = []
    evaluated = []
    for name, corpus in texts.items():
        label = f"{argument} {name}".strip()
        segments = align(corpus, student, teachers, options, label)
        if held_out:
            # Split after the alignment, so that another share or seed still finds the aligned
            # documents in the cache. Take it of each corpus, so that each has its own loss.
            segments, part = segments.split(held_out, seed)
            if not len(segments.rows):
                raise OptionError(
                    "eval_fraction", f"{held_out} leaves nothing of {label}: lower it"
                )
            evaluated.append(part)
        aligned.append(segments)
    # Packing requires a limit for the teacher's tokens. Without a teacher, it gets one that no text
    # reaches.
    limits = teachers.limits() if teachers else [sys.maxsize]
    lengths = [len(corpus) for corpus in texts.values()]
    names = short_names(list(texts))
    segments, blocks = _pack(aligned, names, lengths, student.limit, limits)
    eval_blocks = None
    if held_out:
        _, eval_blocks = _pack(evaluated, names, lengths, student.limit, limits)
    skipped = {}
    for name, part in zip(blocks.parts, aligned, strict=True):
        # A single corpus has the empty name, and its list needs none.
        if part.reasons:
            skipped[f"skipped_{name}.jsonl" if name else "skipped.jsonl"] = part.reasons
    return Packed(
        blocks=blocks,
        eval_blocks=eval_blocks,
        texts=texts,
        parts=aligned,
        segments=segments,
        totals=lengths,
        skipped=skipped,
    )


def align(
    texts: datasets.Dataset,
    student: Reader,
    teachers: TeacherReaders | None,
    options: PackOptions,
    name: str,
) -> Segments:
    """Align the documents of a corpus, and say how many are skipped, and why.

    Raises:
        ValueError: no document is left, or a store lacks some.
    """
    workers = options.dataset_num_proc or cores()
    # The aligned documents go to the cache of `datasets`, which may be on another disk than the
    # run's directory.
    with explain_full_disk(Path(datasets.config.HF_DATASETS_CACHE), _where_to_cache):
        segments = align_corpus(
            texts,
            student,
            teachers,
            num_proc=workers if workers > 1 and len(texts) >= _MANY_DOCUMENTS else None,
            train_on=options.train_on or TRAIN_ON[0],
        )
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and options.missing_losses == "error":
        missing_losses = named("missing_losses")
        raise OptionError(
            "teacher_losses",
            f"lacks {missing:,} of {len(texts):,} documents of {name}, or has a different text of "
            f"them: score this corpus, leave them out with {missing_losses} skip, or train on them "
            f"without a teacher with {missing_losses} plain",
        )
    if not len(segments.rows):
        raise ValueError(
            f"{name} has no usable document: {len(texts):,} read, {len(segments.skipped):,} "
            f"skipped ({skip_reasons(segments)})"
        )
    if segments.skipped:
        log_main(
            f"{name}: {len(segments.skipped):,} of {len(texts):,} documents were skipped: "
            f"{skip_reasons(segments)}"
        )
    return segments


def _where_to_cache() -> str:
    return "What is aligned stays: set HF_DATASETS_CACHE to another disk"


def _pack(
    parts: Sequence[Segments],
    names: Sequence[str],
    documents: Sequence[int],
    max_length: int,
    limits: Sequence[int],
) -> tuple[Segments, Blocks]:
    """Pack the segments of one corpus, or of each of several.

    Several corpora become one table, in which documents are numbered across all corpora:

        corpus      web 0, web 1, web 2 | math 0, math 1
        document        0,     1,     2 |      3,      4
    """
    segments, sizes = parts[0], None
    if len(parts) > 1:
        segments, sizes = _joined(parts, documents), {}
        for name, part in zip(names, parts, strict=True):
            sizes[name] = len(part.rows)
    blocks = Blocks(segments.rows, max_length, limits, sizes)
    # Held-out documents are not in these segments, so a run resumes only with the same ones.
    blocks.corpus_digest = [part.digest() for part in parts]
    return segments, blocks


def _joined(parts: Sequence[Segments], documents: Sequence[int]) -> Segments:
    """Join the segments of corpora that have so many documents."""
    rows = []
    skipped = []
    first_document = 0
    for part, count in zip(parts, documents, strict=True):
        table = part.rows.data
        # Arrow renumbers the column in memory at once. `datasets.map` would write a new copy of the
        # whole corpus to the disk.
        numbers = pc.add(table.column("document"), pa.scalar(first_document, pa.int32()))
        table = table.set_column(table.column_names.index("document"), "document", numbers)
        # The rows may be a selection, which is a table of indices into the data. It stays valid,
        # because no row has moved. Give the fingerprint, because `datasets` would otherwise hash
        # the tables for a new one.
        renumbered = datasets.Dataset(
            table,
            indices_table=part.rows._indices,
            info=part.rows.info,
            fingerprint=part.rows._fingerprint,
        )
        rows.append(renumbered)
        for document, reason in part.skipped:
            skipped.append((first_document + document, reason))
        # Documents without a segment count, too, because a number is an index into the texts.
        first_document += count
    return Segments(datasets.concatenate_datasets(rows), skipped)


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten the names of corpora for logs, in which no two may be the same.

    >>> short_names(["data/web.jsonl.gz", "org/finemath-4plus", "old/web.jsonl"])
    ['web', 'finemath_4plus', 'web_3']
    """
    shortened: list[str] = []
    for number, name in enumerate(names, start=1):
        short_name = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        # If an earlier corpus has taken a name, this one's number is added. A corpus may already
        # have that name, as web_3.jsonl would.
        while short_name in shortened:
            short_name = f"{short_name}_{number}"
        shortened.append(short_name)
    return shortened
