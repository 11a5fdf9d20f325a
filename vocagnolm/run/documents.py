"""From the corpus of a job to the blocks that it trains and evaluates on."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vocagnolm.chat.columns import is_conversations
from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.cli import corpora_of
from vocagnolm.corpus import joined, load_corpus, load_sample
from vocagnolm.data import MISSING, Segments, align_corpus
from vocagnolm.dist import cores, first_of_machine_first
from vocagnolm.host.options import refuse_idle
from vocagnolm.packing import Blocks
from vocagnolm.readers import Guide
from vocagnolm.run.job import Job
from vocagnolm.run.options import DataOptions
from vocagnolm.run.pair import Pair
from vocagnolm.run.resume import mixed_counts

# Documents of a corpus that a plan is made from, unless it has few enough to read them all.
_SAMPLE_DOCUMENTS, _SMALL_DOCUMENTS = 1000, 10_000
# Below this, processes take longer to start than they save on 32 cores (docs/running.md).
_MANY_DOCUMENTS = 10_000
_OF_CONVERSATIONS = ("train_on", "student_chat_template", "teacher_chat_template")


@dataclass(frozen=True)
class Corpus:
    """Documents of one corpus, read and aligned; in a sample only the first ones."""

    # As typed.
    name: str
    # With the documents that are held out.
    texts: datasets.Dataset
    # To train on.
    segments: Segments
    # Documents of the whole dataset; None if the hub does not say.
    total: int | None
    # To evaluate on, if a share is held out.
    held_out: Segments | None = None

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of the dataset were read."""
        return self.total == len(self.texts)

    @property
    def scale(self) -> float:
        """How many times as large the dataset is as what was read of it, 1 if nobody knows."""
        return (self.total or len(self.texts)) / len(self.texts)


@dataclass(frozen=True)
class Documents:
    """Documents of a job, read, aligned and packed, one corpus behind the other."""

    corpora: Sequence[Corpus]
    # Packed corpus by corpus.
    blocks: Blocks
    # To evaluate on, if there is something.
    held_out: Segments | None = None
    eval_blocks: Blocks | None = None

    @cached_property
    def corpus(self) -> datasets.Dataset:
        """All documents, as the segments number them."""
        return joined([each.texts for each in self.corpora], [each.name for each in self.corpora])

    @cached_property
    def segments(self) -> Segments:
        """Segments of all corpora to train on."""
        return _in_a_row(self.corpora, [each.segments for each in self.corpora])

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a dataset were read."""
        return all(each.is_whole for each in self.corpora)

    @property
    def total(self) -> int | None:
        """Documents of all datasets; None if the hub does not say."""
        totals = [each.total for each in self.corpora]
        return None if None in totals else sum(filter(None, totals))

    @property
    def scale(self) -> float:
        """How many times as many tokens the datasets have as what was read of them."""
        tokens = [each.segments.total("student_tokens") for each in self.corpora]
        return float(np.average([each.scale for each in self.corpora], weights=tokens))

    def steps(self, per_step: int) -> int:
        """Return the steps of an epoch, extrapolated from a sample."""
        if self.blocks.weights is not None:
            parts = zip(self.blocks.parts.values(), self.corpora, strict=True)
            sizes = [count * corpus.scale for count, corpus in parts]
            return int(mixed_counts(sizes, self.blocks.weights).sum()) // per_step
        return int(len(self.blocks) * self.scale) // per_step

    def settings(self, pair: Pair) -> dict[str, object]:
        """Return what the corpus adds to the settings of a run: progress is counted in blocks."""
        digests = [each.segments.digest() for each in self.corpora]
        digest = digests[0] if len(digests) == 1 else digests
        read: dict[str, object] = {"corpus_digest": digest, "blocks": len(self.blocks)}
        if any(is_conversations(each.texts) for each in self.corpora):
            readers = [pair.student_reader, *(pair.guide.readers if pair.guide else ())]
            shown = repr([reader.template for reader in readers])
            read["chat_templates_sha256"] = hashlib.sha256(shown.encode()).hexdigest()
        if pair.is_stored and pair.guide:
            return read | {"teacher_losses_sha256": pair.guide.fingerprint()}
        return read

    def write_skipped(self, output_dir: str | Path) -> None:
        """List the documents that were left out, with the reasons; a file for each corpus."""
        for each, name in zip(self.corpora, self.blocks.parts, strict=True):
            end = f"_{name}" if name else ""
            write_reasons(each.segments.reasons, Path(output_dir) / f"skipped{end}.jsonl")
        if self.held_out is not None:
            write_reasons(self.held_out.reasons, Path(output_dir) / "eval_skipped.jsonl")


def write_reasons(reasons: Sequence[tuple[int, str]], path: Path) -> None:
    """Write why documents were left out as JSON lines; no file where none was."""
    if reasons:
        rows = (json.dumps({"document": number, "reason": why}) + "\n" for number, why in reasons)
        path.write_text("".join(rows), encoding="utf-8")


def load_documents(job: Job, pair: Pair, *, sample: bool = False) -> Documents:
    """Align and pack the corpora; the first process of a machine works, the others read its cache.

    A `sample` is of the first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, length, rows = job.data, job.pack.max_length, pair.teacher_rows
    corpora, evaluated = _align(job, pair, sample=sample)
    if data.eval_fraction:
        corpora = [_hold_out(job, corpus) for corpus in corpora]
    blocks = _pack(corpora, [each.segments for each in corpora], length, rows)
    held_out, eval_blocks = evaluated, None
    if evaluated:
        eval_blocks = Blocks(evaluated.rows, length, rows)
    elif parts := [each.held_out for each in corpora if each.held_out]:
        held_out, eval_blocks = _in_a_row(corpora, parts), _pack(corpora, parts, length, rows)
    blocks.weights = data.dataset_weights
    found = Documents(corpora, blocks, held_out, eval_blocks)
    # A smaller corpus would make no optimizer step at all.
    per_step = job.run.global_batch_tokens // length
    steps = found.steps(per_step)
    if found.is_whole and not steps:
        raise ValueError(_too_small(job, found, per_step))
    if sample and found.total and not found.is_whole and steps < 2:
        return load_documents(job, pair)
    return found


def _too_small(job: Job, documents: Documents, per_step: int) -> str:
    """Say why there is no optimizer step."""
    blocks, length = documents.blocks, job.pack.max_length
    return (
        f"--dataset {' '.join(job.data.dataset)} makes {len(blocks):,} blocks of {length} tokens, "
        f"one optimizer step needs {per_step:,}: lower --global_batch_tokens to at most "
        f"{len(blocks) * length}"
    )


def _align(job: Job, pair: Pair, *, sample: bool) -> tuple[list[Corpus], Segments | None]:
    """Read and align every corpus, or its first documents, and the one to evaluate on, if any."""
    data, sources = job.data, corpora_of(job.data)

    def align(texts: datasets.Dataset, guide: Guide | None) -> Segments:
        processes, labelled = processes_of(job, len(texts)), job.pack.train_on or TRAIN_ON[0]
        reader = pair.student_reader
        return align_corpus(texts, reader, guide, num_proc=processes, train_on=labelled)

    with first_of_machine_first():
        # All of them first: a wrong name is told before any is aligned.
        evaluated = _read_evaluated(data)
        read = [_read(job, *source, sample=sample) for source in sources]
        check_turns(job, [texts for texts, _ in read])
        corpora = [
            Corpus(name, texts, align(texts, pair.guide), total)
            for (name, _), (texts, total) in zip(sources, read, strict=True)
        ]
    for corpus in corpora:
        _check_usable(corpus, data)
    if evaluated is None:
        return corpora, None
    with first_of_machine_first():
        # A store knows other documents only, and evaluation needs no teacher.
        held_out = align(evaluated, None if pair.is_stored else pair.guide)
    if not len(held_out.rows):
        raise ValueError(f"--eval_dataset {data.eval_dataset} has no usable document")
    return corpora, held_out


def _check_usable(corpus: Corpus, data: DataOptions) -> None:
    """Reject a corpus of which nothing is left, or a store does not know enough."""
    name, read, skipped = corpus.name, len(corpus.texts), corpus.segments.skipped
    missing = sum(reason == MISSING for _, reason in skipped)
    if missing and data.missing_losses == "error":
        raise ValueError(
            f"--teacher_losses lacks {missing:,} of {read:,} documents of --dataset {name}, or has "
            "another text of them: score this corpus, or leave them out with --missing_losses skip"
        )
    if not len(corpus.segments.rows):
        raise ValueError(
            f"--dataset {name} has no usable document: {read:,} read, {len(skipped):,} skipped "
            f"({skip_reasons(corpus.segments)})"
        )


def _read(
    job: Job, name: str, options: Mapping[str, Any], *, sample: bool
) -> tuple[datasets.Dataset, int | None]:
    """Read a corpus or its first documents, with the number of all."""
    if sample and job.run.dry_run:
        # Of a corpus of the hub, without the rest.
        corpus, total = load_sample(name, _SAMPLE_DOCUMENTS, **options)
        if total is None or total > _SMALL_DOCUMENTS:
            return corpus, total
    corpus = load_corpus(name, **options)
    total = len(corpus)
    if sample and total > _SMALL_DOCUMENTS:
        corpus = corpus.select(range(_SAMPLE_DOCUMENTS))
    return corpus, total


def processes_of(job: Job, documents: int) -> int | None:
    """Return the number of processes that share the work on a corpus; None: this one alone."""
    count = job.pack.num_proc or cores()
    return count if documents >= _MANY_DOCUMENTS and count > 1 else None


def check_turns(job: Job, corpora: Sequence[datasets.Dataset]) -> None:
    """Reject options that have no effect on conversations, or on documents where there are none."""
    if not any(map(is_conversations, corpora)):
        given = vars(job.pack)
        names = {name for name in _OF_CONVERSATIONS if given[name]}
        refuse_idle(names, _OF_CONVERSATIONS, "where --dataset holds documents")
        return
    if job.method.method == "chunk":
        raise ValueError(
            "--method chunk cuts a block into equal chunks, but of conversations some tokens have "
            "no labels: use --method vocagnolm"
        )
    if job.model.save_store:
        raise ValueError(
            "--save_store: of conversations, training computes the teacher's losses of the answers "
            "alone: leave it out, and score them with vocagnolm score"
        )


def _read_evaluated(data: DataOptions) -> datasets.Dataset | None:
    if not data.eval_dataset:
        return None
    column = data.text_column[0] if data.text_column else None
    return load_corpus(data.eval_dataset, text_column=column, option="--eval_dataset")


def _hold_out(job: Job, corpus: Corpus) -> Corpus:
    """Hold a share of the documents out."""
    fraction, run = job.data.eval_fraction, job.run
    # The seed of the data, as Trainer reads it.
    seed = run.seed if run.data_seed is None else run.data_seed
    rest, held_out = corpus.segments.split(fraction, seed)
    if not len(rest.rows):
        raise ValueError(
            f"--eval_fraction {fraction} leaves no document of {corpus.name} to train on: lower "
            "it, or evaluate on other documents with --eval_dataset"
        )
    return replace(corpus, segments=rest, held_out=held_out)


def _pack(
    corpora: Sequence[Corpus], parts: Sequence[Segments], length: int, teacher_rows: list[int]
) -> Blocks:
    """Pack the segments of every corpus by themselves; blocks of several are known by names."""
    rows = [len(part.rows) for part in parts]
    names = _short_names([corpus.name for corpus in corpora])
    named = dict(zip(names, rows, strict=True)) if len(rows) > 1 else None
    return Blocks(_in_a_row(corpora, parts).rows, length, teacher_rows, named)


def _in_a_row(corpora: Sequence[Corpus], parts: Sequence[Segments]) -> Segments:
    """Join segments of the corpora; documents are numbered on, from corpus to corpus."""
    if len(parts) == 1:
        return parts[0]
    rows, skipped, first = [], [], 0
    for corpus, part in zip(corpora, parts, strict=True):
        table = part.rows.data
        column = pc.add(table.column("document"), pa.scalar(first, pa.int32()))
        table = table.set_column(table.column_names.index("document"), "document", column)
        about = {"info": part.rows.info, "fingerprint": part.rows._fingerprint}
        rows.append(datasets.Dataset(table, indices_table=part.rows._indices, **about))
        skipped += [(first + document, why) for document, why in part.skipped]
        first += len(corpus.texts)
    return Segments(datasets.concatenate_datasets(rows), skipped)


def _short_names(names: Sequence[str]) -> list[str]:
    """Name corpora in logs, where two may not be alike.

    >>> _short_names(["data/web.jsonl.gz", "org/finemath-4plus", "old/web.jsonl"])
    ['web', 'finemath_4plus', 'web_3']
    """
    short: list[str] = []
    for number, name in enumerate(names, 1):
        stem = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        short.append(f"{stem}_{number}" if stem in short else stem)
    return short


def skip_reasons(segments: Segments) -> str:
    """Return the three most frequent reasons for leaving a document out, with counts."""
    reasons = Counter(reason for _, reason in segments.skipped)
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
