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
    skip_reasons,
    skipped_line,
)
from vocagnolm.dist import cores, machine_first
from vocagnolm.fields import corpora_of
from vocagnolm.io import told_of_full_disk
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders
from vocagnolm.texts import is_conversations, joined
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.models import Models
from vocagnolm.training.options import DataOptions, PackOptions
from vocagnolm.training.sampler import mixed_counts
from vocagnolm.training.settings import Job

logger = logging.getLogger(__name__)

# Documents of a corpus that a plan is made from, unless it has few enough to read them all.
_SAMPLE_DOCUMENTS, _SMALL_DOCUMENTS = 1000, 10_000
# Skipped documents that are worth a warning.
_LOUD_SHARE = 0.05
# Below this, processes take longer to start than they save on 32 cores.
_MANY_DOCUMENTS = 10_000


@dataclass(frozen=True)
class Corpus:
    """Documents of one corpus, read and aligned; in a sample only the first ones."""

    # As typed.
    name: str
    # With the documents that are held out.
    texts: datasets.Dataset
    # To train on.
    segments: Segments
    # Documents of the whole dataset; None if it is not known.
    total: int | None


@dataclass(frozen=True)
class Documents:
    """Documents of a job, read, aligned and packed, one corpus behind the other.

    Attributes:
        texts: all documents, in the order of the segments' indices.
        settings: what the corpus adds to those of the run: progress is counted in packed sequences.
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
            if corpus.segments.reasons:
                file = f"skipped_{name}.jsonl" if name else "skipped.jsonl"
                lists[file] = corpus.segments.reasons
        return lists

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a dataset were read."""
        return all(each.total == len(each.texts) for each in self.corpora)


def load_documents(job: Job, models: Models, *, sample: bool = False) -> Documents:
    """Read, align and pack the corpora; one process of a machine works, the others read its cache.

    A `sample` is of the first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, args = job.data, job.args
    with machine_first():
        corpora, evaluated = _align_corpora(job, models, sample)
    if data.eval_fraction:
        # The seed of the data, as Trainer reads it.
        seed = args.seed if args.data_seed is None else args.data_seed
        for index, corpus in enumerate(corpora):
            rest, held_out = corpus.segments.split(data.eval_fraction, seed)
            if not len(rest.rows):
                raise ValueError(
                    f"--eval_fraction {data.eval_fraction} leaves no document of {corpus.name} to "
                    "train on: lower it, or evaluate on other documents with --eval_dataset"
                )
            corpora[index] = replace(corpus, segments=rest)
            evaluated.append(held_out)
    limits = models.guide.limits() if models.guide else [sys.maxsize]
    segments, blocks = _pack(corpora, [each.segments for each in corpora], args.max_length, limits)
    blocks.weights = data.dataset_weights
    blocks.corpus_digest = [corpus.segments.digest() for corpus in corpora]
    found = Documents(
        corpora=corpora,
        texts=joined([each.texts for each in corpora]),
        segments=segments,
        blocks=blocks,
        eval_blocks=_pack(corpora, evaluated, args.max_length, limits)[1] if evaluated else None,
        settings=_settings_of_corpora(job, models, corpora, blocks),
        files=_describe_files(data),
    )
    steps = epoch_steps(job, found)
    if found.is_whole and not steps:
        left_out = [
            f"of {each.name} {skipped_line(each.segments, len(each.texts))}"
            for each in corpora
            if each.segments.skipped
        ]
        if data.eval_fraction:
            left_out.append(f"--eval_fraction {data.eval_fraction} holds out others")
        check_enough(blocks, args, f"--dataset {' '.join(data.dataset)}", left_out)
    # The corpus may be too small, which only the whole corpus shows.
    if not found.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return found


def _align_corpora(job: Job, models: Models, sample: bool) -> tuple[list[Corpus], list[Segments]]:
    """Read and align the corpora, and the one that is evaluated on, if any."""
    data = job.data
    # All of them first: a wrong name is reported before any is aligned.
    to_evaluate = None
    if data.eval_dataset:
        column = data.text_column[0] if data.text_column else None
        name, option = data.eval_dataset, "--eval_dataset"
        to_evaluate = load_corpus(name, split=None, text_column=column, option=option)
    read = [(name, *_read(job, name, given, sample)) for name, given in corpora_of(data)]
    if job.args.method == "chunk" and any(is_conversations(texts) for _, texts, _ in read):
        raise ValueError(
            "--method chunk needs a loss of every token, and the questions of a conversation have "
            "none"
        )
    corpora = []
    for name, texts, total in read:
        shown = f"--dataset {name}"
        segments = align(texts, models.reader, models.guide, job.args, shown)
        corpora.append(Corpus(name, texts, segments, total))
    if to_evaluate is None:
        return corpora, []
    # A store knows other documents only, and evaluation needs no teacher.
    online = None if job.model.teacher_losses else models.guide
    shown = f"--eval_dataset {data.eval_dataset}"
    return corpora, [align(to_evaluate, models.reader, online, job.args, shown)]


def _describe_files(data: DataOptions) -> list[str]:
    """Say of each directory which of its files are read, and which are not."""
    found = []
    for name, given in corpora_of(data):
        found.append((name, files_of(name, split=given["split"], config_name=given["config_name"])))
    if data.eval_dataset:
        files = files_of(data.eval_dataset, split=None, option="--eval_dataset")
        found.append((data.eval_dataset, files))
    notes = [(Path(name).name, each.describe()) for name, each in found if each]
    return [f"{name}: {note}" for name, note in notes if note]


def _settings_of_corpora(
    job: Job, models: Models, corpora: Sequence[Corpus], blocks: Blocks
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "corpus_digest": blocks.corpus_digest,
        "blocks": len(blocks),
    }
    if any(is_conversations(each.texts) for each in corpora):
        readers = [models.reader, *(models.guide.readers if models.guide else ())]
        shown = repr([reader.template for reader in readers])
        found["chat_templates_sha256"] = hashlib.sha256(shown.encode()).hexdigest()
    if job.model.teacher_losses and models.guide:
        found["teacher_losses_sha256"] = models.guide.fingerprint()
    return found


def _read(
    job: Job, name: str, given: dict[str, Any], sample: bool
) -> tuple[datasets.Dataset, int | None]:
    """Read a corpus or its first documents, with the number of all."""
    if sample and job.args.dry_run:
        # Of a corpus of the hub, without the rest.
        texts, total = load_sample(name, _SAMPLE_DOCUMENTS, **given)
        if total is None or total > _SMALL_DOCUMENTS:
            return texts, total
    texts = load_corpus(name, **given)
    total = len(texts)
    if sample and total > _SMALL_DOCUMENTS:
        texts = texts.select(range(_SAMPLE_DOCUMENTS))
    return texts, total


def align(
    texts: datasets.Dataset,
    reader: Reader,
    guide: TeacherReaders | None,
    options: PackOptions,
    shown: str,
) -> Segments:
    """Align documents; a ValueError where none is left, or a store lacks some."""
    workers = options.dataset_num_proc or cores()
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    with told_of_full_disk(
        cache, lambda: "What is aligned stays: set HF_DATASETS_CACHE to another disk"
    ):
        segments = align_corpus(
            *(texts, reader, guide),
            num_proc=workers if workers > 1 and len(texts) >= _MANY_DOCUMENTS else None,
            train_on=options.train_on or TRAIN_ON[0],
        )
    share = len(segments.skipped) / max(len(texts), 1)
    if _LOUD_SHARE < share < 1:
        logger.warning(
            "%s of the documents of %s are skipped (%s)",
            *(f"{share:.0%}", shown, skip_reasons(segments)),
        )
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and options.missing_losses == "error":
        raise ValueError(
            f"--teacher_losses lacks {missing:,} of {len(texts):,} documents of {shown}, or has "
            "another text of them: score this corpus, leave them out with --missing_losses skip, "
            "or train on them without a teacher with --missing_losses plain"
        )
    if not len(segments.rows):
        raise ValueError(
            f"{shown} has no usable document: {len(texts):,} read, {len(segments.skipped):,} "
            f"skipped ({skip_reasons(segments)})"
        )
    return segments


def check_enough(
    blocks: Blocks, args: VocAgnoConfig, shown: str, left_out: Sequence[str] = ()
) -> None:
    """Raise a ValueError for fewer packed sequences than one optimizer step needs.

    The message says what left documents out, and gives numbers that these sequences allow.
    """
    rows, world = args.per_device_train_batch_size, args.world_size
    needed = rows * args.gradient_accumulation_steps * world
    if len(blocks) >= needed:
        return
    sequences = "1 sequence" if len(blocks) == 1 else f"{len(blocks):,} sequences"
    found = (
        f"{shown} makes {sequences} of {args.max_length} tokens, and one optimizer step needs "
        f"{needed:,}"
    )
    if left_out:
        found += f" ({'; '.join(left_out)})"
    # Batches that the sequences fill, of the size that was asked for.
    steps = len(blocks) // (rows * world)
    most_rows = len(blocks) // world
    asked_rows = "per_device_train_batch_size" in args.asked_of_batch
    advice = []
    if not most_rows:
        advice = ["--max_length, or give more documents"]
    elif "global_batch_tokens" in args.asked_of_batch:
        whole = steps * rows if asked_rows and steps else most_rows
        advice = [f"--global_batch_tokens to at most {whole * world * args.max_length}"]
        if asked_rows and not steps:
            advice.append(f"--per_device_train_batch_size to {most_rows}")
    elif steps:
        advice = [f"--gradient_accumulation_steps to at most {steps}"]
    else:
        advice = [f"--per_device_train_batch_size to at most {most_rows}"]
        if args.gradient_accumulation_steps > 1:
            advice.append("--gradient_accumulation_steps to 1")
    raise ValueError(f"{found}: lower {' and '.join(advice)}")


def _pack(
    corpora: Sequence[Corpus], parts: Sequence[Segments], max_length: int, limits: Sequence[int]
) -> tuple[Segments, Blocks]:
    """Pack segments of one data set, or of each corpus: documents are counted through all."""
    if len(parts) == 1:
        return parts[0], Blocks(parts[0].rows, max_length, limits)
    rows, skipped, first, sizes = [], [], 0, {}
    names = _short_names([corpus.name for corpus in corpora])
    for name, corpus, part in zip(names, corpora, parts, strict=True):
        table = part.rows.data
        column = pc.add(table.column("document"), pa.scalar(first, pa.int32()))
        table = table.set_column(table.column_names.index("document"), "document", column)
        about = {"info": part.rows.info, "fingerprint": part.rows._fingerprint}
        rows.append(datasets.Dataset(table, indices_table=part.rows._indices, **about))
        skipped += [(first + document, why) for document, why in part.skipped]
        first += len(corpus.texts)
        sizes[name] = len(part.rows)
    segments = Segments(datasets.concatenate_datasets(rows), skipped)
    return segments, Blocks(segments.rows, max_length, limits, sizes)


def _short_names(names: Sequence[str]) -> list[str]:
    """Name corpora in logs, where two may not be alike.

    >>> _short_names(["data/web.jsonl.gz", "org/finemath-4plus", "old/web.jsonl"])
    ['web', 'finemath_4plus', 'web_3']
    """
    short: list[str] = []
    for index, name in enumerate(names, 1):
        stem = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        short.append(f"{stem}_{index}" if stem in short else stem)
    return short


def steps_of(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of a run; None if nobody knows how large its corpus is."""
    if job.args.max_steps > 0:
        return job.args.max_steps
    of_epoch = epoch_steps(job, documents)
    return None if of_epoch is None else math.ceil(job.args.num_train_epochs * of_epoch)


def epoch_steps(job: Job, documents: Documents) -> int | None:
    """Return the optimizer steps of an epoch, extrapolated from a sample; None if nobody knows."""
    sizes, weights = expected_sequences(documents), documents.blocks.weights
    if sizes is None:
        return None
    read = sum(sizes) if weights is None else mixed_counts(sizes, weights).sum()
    return int(read) // (job.args.global_batch_tokens // job.args.max_length)


def expected_sequences(documents: Documents) -> list[float] | None:
    """Extrapolate the packed sequences of each corpus; None if nobody knows its documents."""
    sizes = []
    for count, each in zip(documents.blocks.parts.values(), documents.corpora, strict=True):
        if each.total is None:
            return None
        sizes.append(count * each.total / len(each.texts))
    return sizes
