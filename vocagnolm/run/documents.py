"""The documents of a job: corpora are read, aligned and packed."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from vocagnolm.chat.reading import TRAIN_ON, TrainOn
from vocagnolm.cli import corpora_of, listed
from vocagnolm.corpus import is_conversations, joined, load_corpus, load_sample, only_text
from vocagnolm.data import MISSING, Segments, align_corpus
from vocagnolm.dist import cores, machine_first
from vocagnolm.packing import Blocks, PackedCollator
from vocagnolm.readers import TeacherReaders, student_reader, teacher_reader
from vocagnolm.run.job import Job, Models
from vocagnolm.run.options import DataOptions
from vocagnolm.run.plan import epoch_steps, skip_reasons

# Documents of a corpus that a plan is made from, unless it has few enough to read them all.
_SAMPLE_DOCUMENTS, _SMALL_DOCUMENTS = 1000, 10_000
# Below this, processes take longer to start than they save on 32 cores (docs/running.md).
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
    """

    corpora: list[Corpus]
    texts: datasets.Dataset
    segments: Segments
    blocks: Blocks
    collator: PackedCollator
    eval_blocks: Blocks | None
    settings: dict[str, Any]

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of a dataset were read."""
        return all(each.total == len(each.texts) for each in self.corpora)

    def write_skipped(self, output_dir: str | Path) -> None:
        """List the documents that were left out, with the reasons; a file for each corpus."""
        for each, name in zip(self.corpora, self.blocks.parts, strict=True):
            end = f"_{name}" if name else ""
            write_reasons(each.segments.reasons, Path(output_dir) / f"skipped{end}.jsonl")


def write_reasons(reasons: Sequence[tuple[int, str]], path: Path) -> None:
    """Write why documents were left out as JSON lines; no file where none was."""
    if reasons:
        rows = (json.dumps({"document": index, "reason": why}) + "\n" for index, why in reasons)
        path.write_text("".join(rows), encoding="utf-8")


def load_documents(job: Job, models: Models, *, sample: bool = False) -> Documents:
    """Read, align and pack the corpora; one process of a machine works, the others read its cache.

    A `sample` is of the first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, pack = job.data, job.pack
    evaluated: list[Segments] = []
    with machine_first():
        # All of them first: a wrong name is reported before any is aligned.
        to_evaluate = None
        if data.eval_dataset:
            column = data.text_column[0] if data.text_column else None
            name, option = data.eval_dataset, "--eval_dataset"
            to_evaluate = load_corpus(name, text_column=column, option=option)
        read = [(name, *_read(job, name, given, sample)) for name, given in corpora_of(data)]
        _check_conversations(job, [texts for _, texts, _ in read])
        corpora = []
        for name, texts, total in read:
            corpora.append(Corpus(name, texts, _align(job, models, texts, models.guide), total))
            _check_usable(corpora[-1], data)
        if to_evaluate is not None:
            # A store knows other documents only, and evaluation needs no teacher.
            online = None if job.model.teacher_losses else models.guide
            evaluated = [_align(job, models, to_evaluate, online)]
            if not len(evaluated[0].rows):
                raise ValueError(f"--eval_dataset {data.eval_dataset} has no usable document")
    if data.eval_fraction:
        split = [_hold_out(job, corpus) for corpus in corpora]
        corpora, evaluated = [rest for rest, _ in split], [held_out for _, held_out in split]
    segments, blocks = _pack(job, models, corpora, [each.segments for each in corpora])
    blocks.weights = data.dataset_weights
    found = Documents(
        corpora=corpora,
        texts=joined([each.texts for each in corpora], [each.name for each in corpora]),
        segments=segments,
        blocks=blocks,
        collator=PackedCollator(
            pack.max_length,
            attend_across_documents=pack.attend_across_documents,
            teacher_max_length=models.teacher_rows,
            chunks=job.method.chunks if job.method.method == "chunk" else None,
            shares=job.method.aggregation == "share",
        ),
        eval_blocks=_pack(job, models, corpora, evaluated)[1] if evaluated else None,
        settings=_settings_of_corpora(models, corpora, blocks),
    )
    steps = epoch_steps(job, found)
    if found.is_whole and not steps:
        needed = job.run.global_batch_tokens // pack.max_length
        raise ValueError(
            f"--dataset {' '.join(data.dataset)} makes {len(blocks):,} sequences of "
            f"{pack.max_length} tokens, and one optimizer step needs {needed:,}: lower "
            f"--global_batch_tokens to at most {len(blocks) * pack.max_length}"
        )
    # The corpus may be too small, which only the whole corpus shows.
    if not found.is_whole and steps is not None and steps < 2:
        return load_documents(job, models)
    return found


def _settings_of_corpora(
    models: Models, corpora: Sequence[Corpus], blocks: Blocks
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "corpus_digest": [each.segments.digest() for each in corpora],
        "blocks": len(blocks),
    }
    if any(is_conversations(each.texts) for each in corpora):
        readers = [models.reader, *(models.guide.readers if models.guide else ())]
        shown = repr([reader.template for reader in readers])
        found["chat_templates_sha256"] = hashlib.sha256(shown.encode()).hexdigest()
    if models.options.teacher_losses and models.guide:
        found["teacher_losses_sha256"] = models.guide.fingerprint()
    return found


def _read(
    job: Job, name: str, given: dict[str, Any], sample: bool
) -> tuple[datasets.Dataset, int | None]:
    """Read a corpus or its first documents, with the number of all."""
    if sample and job.run.dry_run:
        # Of a corpus of the hub, without the rest.
        texts, total = load_sample(name, _SAMPLE_DOCUMENTS, **given)
        if total is None or total > _SMALL_DOCUMENTS:
            return texts, total
    texts = load_corpus(name, **given)
    total = len(texts)
    if sample and total > _SMALL_DOCUMENTS:
        texts = texts.select(range(_SAMPLE_DOCUMENTS))
    return texts, total


def _check_conversations(job: Job, corpora: Sequence[datasets.Dataset]) -> None:
    """Reject what needs a teacher's loss, or a label, of every token."""
    if not any(map(is_conversations, corpora)):
        return
    if job.method.method == "chunk":
        raise ValueError(
            "--method chunk cuts a sequence into equal chunks, but of conversations some tokens "
            "have no labels: use --method vocagnolm"
        )
    if job.model.save_store:
        raise ValueError(
            "--save_store: of conversations, training computes the teacher's losses of the answers "
            "alone: leave it out, and score them with vocagnolm score"
        )


def _align(
    job: Job, models: Models, texts: datasets.Dataset, guide: TeacherReaders | None
) -> Segments:
    workers = job.pack.num_proc or cores()
    return align_corpus(
        *(texts, models.reader, guide),
        num_proc=workers if workers > 1 and len(texts) >= _MANY_DOCUMENTS else None,
        train_on=job.pack.train_on or TRAIN_ON[0],
    )


def _check_usable(corpus: Corpus, data: DataOptions) -> None:
    """Reject a corpus of which nothing is left, or that a store lacks documents of."""
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


def _hold_out(job: Job, corpus: Corpus) -> tuple[Corpus, Segments]:
    """Return a corpus without a share of its documents, and that share."""
    fraction, run = job.data.eval_fraction, job.run
    # The seed of the data, as Trainer reads it.
    seed = run.seed if run.data_seed is None else run.data_seed
    rest, held_out = corpus.segments.split(fraction, seed)
    if not len(rest.rows):
        raise ValueError(
            f"--eval_fraction {fraction} leaves no document of {corpus.name} to train on: lower "
            "it, or evaluate on other documents with --eval_dataset"
        )
    return replace(corpus, segments=rest), held_out


def _pack(
    job: Job, models: Models, corpora: Sequence[Corpus], parts: Sequence[Segments]
) -> tuple[Segments, Blocks]:
    """Concatenate and pack segments of one data set, or of each corpus: by a short name."""
    segments, sizes = parts[0], None
    if len(parts) > 1:
        segments = _concatenated(corpora, parts)
        names = _short_names([corpus.name for corpus in corpora])
        sizes = {name: len(part.rows) for name, part in zip(names, parts, strict=True)}
    return segments, Blocks(segments.rows, job.pack.max_length, models.teacher_rows, sizes)


def _concatenated(corpora: Sequence[Corpus], parts: Sequence[Segments]) -> Segments:
    """Concatenate segments; the index of a document is counted through all corpora."""
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
    for index, name in enumerate(names, 1):
        stem = re.sub(r"\W+", "_", Path(name).name.split(".")[0]) or "corpus"
        short.append(f"{stem}_{index}" if stem in short else stem)
    return short


def prepare_dataset(
    dataset: datasets.Dataset,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase] | None = None,
    *,
    max_length: int = 2048,
    teacher_context: int = 4096,
    text_column: str | None = None,
    train_on: TrainOn | None = None,
    num_proc: int | None = None,
) -> Blocks:
    """Align and pack documents: the `train_dataset` or `eval_dataset` of a `VocAgnoTrainer`.

    Columns `messages`, or `prompt` and `completion`, hold conversations, of which the answers are
    trained on, or all (`train_on="all"`), in the chat template of each tokenizer.

    A packed sequence has up to `max_length` tokens of the student and `teacher_context` of the, or
    each, teacher, within the contexts of their models. Without a teacher it is for training on all
    tokens. Aligned documents are cached as `datasets.map` caches.

    Raises:
        ValueError: the column is not there, or no document of it can be used.
    """
    corpus = only_text(dataset, text_column, "the dataset")
    readers = [teacher_reader(each, teacher_context) for each in listed(teacher_tokenizer or [])]
    aligned = align_corpus(
        corpus,
        student_reader(student_tokenizer, max_length),
        TeacherReaders(tuple(readers)) if readers else None,
        num_proc=num_proc,
        train_on=train_on or TRAIN_ON[0],
    )
    if not len(aligned.rows):
        raise ValueError(
            f"no usable document among {len(corpus):,}: {aligned.skipped[:1] or 'there is none'}"
        )
    return Blocks(aligned.rows, max_length, [teacher_context] * max(len(readers), 1))
