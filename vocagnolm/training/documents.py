"""The documents of a run: read, aligned, packed, and counted in steps."""

from __future__ import annotations

import hashlib
import logging
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.corpus import files_of, load_corpus, load_sample
from vocagnolm.data import (
    MISSING,
    Segments,
    align_corpus,
    check_readable,
    skip_reasons,
    skipped_line,
)
from vocagnolm.fields import OptionError, corpora_of, named
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders
from vocagnolm.shell.dist import cores, machine_first
from vocagnolm.shell.io import told_of_full_disk
from vocagnolm.texts import is_conversations, joined
from vocagnolm.training.models import Models
from vocagnolm.training.options import DataOptions, PackOptions
from vocagnolm.training.requirements import check_enough
from vocagnolm.training.sampler import mixed_counts
from vocagnolm.training.settings import Job

logger = logging.getLogger(__name__)

# A plan of a large corpus is made from this many documents.
_SAMPLE_DOCUMENTS = 1000
# For a plan, a corpus with at most this many documents is read whole.
_SMALL_DOCUMENTS = 10_000
# The user is warned if a larger share of documents is skipped.
_LOUD_SHARE = 0.05
# With fewer documents, processes take longer to start than they save on 32 cores.
_MANY_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Corpus:
    """The documents of one corpus, read and aligned. In a sample, only the first ones.

    Attributes:
        name: the corpus as the user typed it.
        texts: its documents, those that are held out included.
        segments: the aligned segments to train on.
        total: documents of the whole dataset; None if nobody knows.
    """

    name: str
    texts: datasets.Dataset
    segments: Segments
    total: int | None


@dataclass(frozen=True)
class Documents:
    """The documents of a job, read, aligned and packed, one corpus after the other.

    Attributes:
        texts: all documents, in the order of the segments' indices.
        settings: what the corpora add to the settings of the run.
        files: which files of directories were read, and which were not.
    """

    corpora: list[Corpus]
    texts: datasets.Dataset
    segments: Segments
    blocks: Blocks
    eval_blocks: Blocks | None
    settings: dict[str, Any]
    files: list[str]

    @property
    def skipped(self) -> dict[str, list[tuple[int, str]]]:
        """The documents that were left out, with the reasons, by the file that lists them."""
        lists = {}
        for corpus, name in zip(self.corpora, self.blocks.parts, strict=True):
            # A single corpus has the empty name, and its list needs none.
            if corpus.segments.reasons:
                file = f"skipped_{name}.jsonl" if name else "skipped.jsonl"
                lists[file] = corpus.segments.reasons
        return lists

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a dataset were read."""
        # None means an unknown total, which equals no length, so the corpus counts as a sample.
        return all(corpus.total == len(corpus.texts) for corpus in self.corpora)


def load_documents(job: Job, models: Models, *, sample: bool = False) -> Documents:
    """Read, align and pack the corpora that a job names.

    One process of each machine does the work, and the others read its cache. A `sample` is the
    first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, args = job.data, job.args
    with machine_first():
        # Read the evaluation before anything is aligned, so that a wrong name shows in seconds.
        eval_texts = _read_evaluation(data)
        # A store has only other documents, and an evaluation needs no teacher.
        guide = models.guide if job.loads_teacher else None
        if eval_texts is not None:
            check_readable(eval_texts, models.reader, guide)
        corpora = _align_corpora(job, models, sample)
        evaluated = []
        if eval_texts is not None:
            eval_name = f"--eval_dataset {data.eval_dataset}"
            evaluated.append(align(eval_texts, models.reader, guide, args, eval_name))
    if data.eval_fraction:
        # Split after the alignment, so that another fraction or seed still finds the aligned
        # documents in the cache.
        corpora, evaluated = _hold_out(corpora, job)
    # Packing requires a limit for the teacher's tokens. Without a teacher, it gets one that no text
    # reaches.
    limits = models.guide.limits() if models.guide else [sys.maxsize]
    trained = [corpus.segments for corpus in corpora]
    segments, blocks = _pack(corpora, trained, args.max_length, limits)
    blocks.weights = data.dataset_weights
    # The held-out documents are no longer in these segments, so a run resumes only with the same
    # held-out documents.
    blocks.corpus_digest = [corpus.segments.digest() for corpus in corpora]
    eval_blocks = None
    if evaluated:
        _, eval_blocks = _pack(corpora, evaluated, args.max_length, limits)
        eval_blocks.corpus_digest = [segments.digest() for segments in evaluated]
    texts = joined([corpus.texts for corpus in corpora])
    documents = Documents(
        corpora=corpora,
        texts=texts,
        segments=segments,
        blocks=blocks,
        eval_blocks=eval_blocks,
        settings=_settings_of_corpora(job, models, corpora, blocks),
        files=_describe_files(data),
    )
    steps = epoch_steps(job, documents)
    # An epoch without a step is an error only for a whole corpus.
    if documents.is_whole and not steps:
        check_enough(blocks, args, f"--dataset {' '.join(data.dataset)}", _left_out(corpora, data))
    # A sample cannot show that a corpus is too small. Only the whole corpus can.
    if not documents.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return documents


def _align_corpora(job: Job, models: Models, sample: bool) -> list[Corpus]:
    """Read and align the corpora to train on."""
    # Read all corpora before the first is aligned, so that a wrong name for the last one does not
    # cost the alignment of the others.
    readings = []
    for name, options in corpora_of(job.data):
        texts, total = _read(job, name, options, sample)
        readings.append((name, texts, total))
        if job.args.method == "chunk" and is_conversations(texts):
            raise OptionError(
                "method",
                "chunk needs a loss of every token, and the questions of a conversation have none",
            )
        check_readable(texts, models.reader, models.guide)
    corpora = []
    for name, texts, total in readings:
        segments = align(texts, models.reader, models.guide, job.args, f"--dataset {name}")
        corpora.append(Corpus(name, texts, segments, total))
    return corpora


def _read_evaluation(data: DataOptions) -> datasets.Dataset | None:
    """Read the corpus of `--eval_dataset`, if there is one."""
    if not data.eval_dataset:
        return None
    column = data.text_column[0] if data.text_column else None
    return load_corpus(data.eval_dataset, split=None, text_column=column, option="--eval_dataset")


def _hold_out(corpora: Sequence[Corpus], job: Job) -> tuple[list[Corpus], list[Segments]]:
    """Split off `--eval_fraction` of each corpus. Returns the rest and the held-out part."""
    args, fraction = job.args, job.data.eval_fraction
    # The seed of the data, as in Trainer: `seed` unless `data_seed` is given.
    seed = args.seed if args.data_seed is None else args.data_seed
    remaining = []
    held_out = []
    for corpus in corpora:
        # Take the same share of each corpus, so that each has its own evaluation loss.
        segments, evaluated = corpus.segments.split(fraction, seed)
        if not len(segments.rows):
            raise OptionError(
                "eval_fraction",
                f"{fraction} leaves no document of {corpus.name} to train on: "
                f"lower it, or evaluate on other documents with {named('eval_dataset')}",
            )
        remaining.append(replace(corpus, segments=segments))
        held_out.append(evaluated)
    return remaining, held_out


def _left_out(corpora: Sequence[Corpus], data: DataOptions) -> list[str]:
    """Say why documents were left out of a corpus that is too small."""
    reasons = []
    for corpus in corpora:
        if corpus.segments.skipped:
            reasons.append(f"of {corpus.name} {skipped_line(corpus.segments, len(corpus.texts))}")
    if data.eval_fraction:
        reasons.append(f"--eval_fraction {data.eval_fraction} holds out others")
    return reasons


def _describe_files(data: DataOptions) -> list[str]:
    """Say which files of each directory are read, and which are not."""
    listings = []
    for name, options in corpora_of(data):
        files = files_of(name, split=options["split"], config_name=options["config_name"])
        listings.append((name, files))
    if data.eval_dataset:
        files = files_of(data.eval_dataset, split=None, option="--eval_dataset")
        listings.append((data.eval_dataset, files))
    lines = []
    for name, files in listings:
        description = files.describe() if files else ""
        if description:
            lines.append(f"{Path(name).name}: {description}")
    return lines


def _settings_of_corpora(
    job: Job, models: Models, corpora: Sequence[Corpus], blocks: Blocks
) -> dict[str, Any]:
    """Return what corpora add to a run's settings: progress is counted in their sequences."""
    settings: dict[str, Any] = {
        "corpus_digest": blocks.corpus_digest,
        "blocks": len(blocks),
    }
    # A template determines the tokens of a conversation, and its file may change.
    if any(is_conversations(corpus.texts) for corpus in corpora):
        templates = [models.reader.template]
        if models.guide:
            templates += [reader.template for reader in models.guide.readers]
        settings["chat_templates_sha256"] = hashlib.sha256(repr(templates).encode()).hexdigest()
    if job.model.teacher_losses and models.guide:
        # A store may keep its name while its losses are scored again, so keep their hash.
        settings["teacher_losses_sha256"] = models.guide.fingerprint()
    return settings


def _read(
    job: Job, name: str, options: dict[str, Any], sample: bool
) -> tuple[datasets.Dataset, int | None]:
    """Read a corpus or its first documents. Also returns the total number."""
    if sample and job.args.dry_run:
        # A plan for a hub dataset does not download the rest.
        texts, total = load_sample(name, _SAMPLE_DOCUMENTS, **options)
        if total is None or total > _SMALL_DOCUMENTS:
            return texts, total
    # A small corpus is cheap to read whole, and then its plan is exact.
    texts = load_corpus(name, **options)
    total = len(texts)
    if sample and total > _SMALL_DOCUMENTS:
        texts = texts.select(range(_SAMPLE_DOCUMENTS))
    return texts, total


def align(
    texts: datasets.Dataset,
    reader: Reader,
    guide: TeacherReaders | None,
    options: PackOptions,
    corpus_name: str,
) -> Segments:
    """Align documents. Errors and warnings name their corpus.

    Raises:
        ValueError: no document is left, or a store lacks some.
    """
    workers = options.dataset_num_proc or cores()
    # The aligned documents go to the cache of `datasets`, which may be on another disk than the
    # run's directory.
    with told_of_full_disk(Path(datasets.config.HF_DATASETS_CACHE), _where_to_cache):
        segments = align_corpus(
            texts,
            reader,
            guide,
            num_proc=workers if workers > 1 and len(texts) >= _MANY_DOCUMENTS else None,
            train_on=options.train_on or TRAIN_ON[0],
        )
    reasons = skip_reasons(segments)
    skipped_share = len(segments.skipped) / max(len(texts), 1)
    if _LOUD_SHARE < skipped_share < 1:
        logger.warning(
            "%.0f%% of the documents of %s are skipped (%s)",
            100 * skipped_share,
            corpus_name,
            reasons,
        )
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and options.missing_losses == "error":
        raise OptionError(
            "teacher_losses",
            f"lacks {missing:,} of {len(texts):,} documents of {corpus_name}, or "
            f"has a different text of them: score this corpus, leave them out with "
            f"{named('missing_losses')} skip, or train on them without a teacher with "
            f"{named('missing_losses')} plain",
        )
    if not len(segments.rows):
        raise ValueError(
            f"{corpus_name} has no usable document: {len(texts):,} read, "
            f"{len(segments.skipped):,} skipped ({reasons})"
        )
    return segments


def _where_to_cache() -> str:
    return "What is aligned stays: set HF_DATASETS_CACHE to another disk"


def _pack(
    corpora: Sequence[Corpus], parts: Sequence[Segments], max_length: int, limits: Sequence[int]
) -> tuple[Segments, Blocks]:
    """Pack the segments of one corpus, or of each of several.

    Several corpora become one table, in which documents are numbered across all corpora:

        corpus      web 0, web 1, web 2 | math 0, math 1
        document        0,     1,     2 |      3,      4
    """
    if len(parts) == 1:
        return parts[0], Blocks(parts[0].rows, max_length, limits)
    rows = []
    skipped = []
    sizes = {}
    first_document = 0
    names = _short_names([corpus.name for corpus in corpora])
    for name, corpus, part in zip(names, corpora, parts, strict=True):
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
        # Documents without a segment count, too, because a number is an index into the joined
        # texts.
        first_document += len(corpus.texts)
        sizes[name] = len(part.rows)
    segments = Segments(datasets.concatenate_datasets(rows), skipped)
    return segments, Blocks(segments.rows, max_length, limits, sizes)


def _short_names(names: Sequence[str]) -> list[str]:
    """Shorten the names of corpora for logs, in which no two may be the same.

    >>> _short_names(["data/web.jsonl.gz", "org/finemath-4plus", "old/web.jsonl"])
    ['web', 'finemath_4plus', 'web_3']
    """
    short_names: list[str] = []
    for number, name in enumerate(names, start=1):
        short_name = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        # If an earlier corpus has taken a name, this one's number is added. A corpus may already
        # have that name, as web_3.jsonl would.
        while short_name in short_names:
            short_name = f"{short_name}_{number}"
        short_names.append(short_name)
    return short_names


def steps_of(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of a run, or None if the size of its corpus is unknown."""
    if job.args.max_steps > 0:
        return job.args.max_steps
    steps = epoch_steps(job, documents)
    return None if steps is None else math.ceil(job.args.num_train_epochs * steps)


def epoch_steps(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of an epoch, extrapolated from a sample, or None if unknown."""
    sizes, weights = expected_sequences(documents), documents.blocks.weights
    if sizes is None:
        return None
    # With weights, an epoch may read the sequences of a corpus several times.
    sequences = sum(sizes) if weights is None else mixed_counts(sizes, weights).sum()
    # A step is a whole number of sequences. An incomplete step at the end of an epoch is not read.
    return int(sequences) // (job.args.global_batch_tokens // job.args.max_length)


def expected_sequences(documents: Documents) -> list[float] | None:
    """Extrapolate the packed sequences of each corpus, or return None if its size is unknown."""
    sizes = []
    for sequences, corpus in zip(documents.blocks.parts.values(), documents.corpora, strict=True):
        if corpus.total is None:
            return None
        # The first documents stand for all, so sequences grow in proportion to documents.
        sizes.append(sequences * corpus.total / len(corpus.texts))
    return sizes
