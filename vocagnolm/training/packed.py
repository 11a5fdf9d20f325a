"""From documents to packed sequences: reads and aligns them, reports skipped ones, packs."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
from transformers.trainer_utils import SaveStrategy, SchedulerType

from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.collator import PackedCollator
from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.data import MISSING, Segments, align_corpus, skip_reasons
from vocagnolm.fields import OptionError, corpora_of, named
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader, TeacherReaders
from vocagnolm.shell.dist import cores, machine_first
from vocagnolm.shell.io import explain_full_disk, log_main
from vocagnolm.texts import is_conversations
from vocagnolm.training.config import MIN_STEPS, VocAgnoConfig
from vocagnolm.training.job import Job
from vocagnolm.training.models import Models
from vocagnolm.training.options import PackOptions
from vocagnolm.training.sampler import mixed_counts

# With fewer documents, processes take longer to start than they save on 32 cores.
_MANY_DOCUMENTS = 10_000
# A plan of a large corpus is made from this many documents.
_SAMPLE_DOCUMENTS = 1000
# For a plan, a corpus with at most this many documents is read whole.
_SMALL_DOCUMENTS = 10_000
CHUNK_NEEDS_DOCUMENTS = (
    "chunk needs a loss of every token, and the questions of a conversation have none"
)

# The documents to train on, by the name of each corpus; their number, which may be larger if a plan
# reads only the first ones, or None if it is unknown; and the documents to evaluate on.
Corpora = tuple[dict[str, datasets.Dataset], list[int | None], dict[str, datasets.Dataset]]


@dataclass(frozen=True)
class Packed:
    """Packed sequences to train and evaluate on, and the documents that they were made of.

    Attributes:
        blocks, eval_blocks: packed sequences; of several evaluations a dict by name.
        texts: the documents of each corpus that were read, by its name. Python may give packed
            sequences, whose documents are not known.
        parts: the aligned segments of each corpus.
        segments: those of all corpora, one after the other. Documents are numbered in each.
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


# -- Documents that options name -----------------------------------------------------------------


def read_corpora(job: Job) -> Corpora:
    """Read all corpora of a job, before the first is aligned.

    So a wrong name for the last one does not cost the alignment of the others.
    """
    data = job.data
    texts: dict[str, datasets.Dataset] = {}
    totals: list[int | None] = []
    evaluated: dict[str, datasets.Dataset] = {}
    # The first process of a machine fills the cache, and the others read from it.
    with machine_first():
        for name, options in corpora_of(data):
            total: int | None = None
            # A plan for a hub dataset does not download the rest, unless all of it is little.
            if job.args.dry_run and not Path(name).expanduser().exists():
                texts[name], total = load_sample(name, _SAMPLE_DOCUMENTS, **options)
                if total is None or total > _SMALL_DOCUMENTS:
                    totals.append(total)
                    continue
            texts[name] = load_corpus(name, **options)
            totals.append(len(texts[name]))
        if data.eval_dataset:
            column = data.text_column[0] if data.text_column else None
            evaluated[data.eval_dataset] = load_corpus(
                data.eval_dataset, split=None, text_column=column, option="eval_dataset"
            )
    return texts, totals, evaluated


def pack_documents(job: Job, models: Models, corpora: Corpora, *, sample: bool = False) -> Packed:
    """Align and pack the documents of a job.

    One process of each machine does the work, and the others read its cache. A `sample` is the
    first documents, unless a corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    data, args = job.data, job.args
    texts, totals, evaluated = corpora
    if sample:
        texts = dict(texts)
        for name, corpus in texts.items():
            # The plan of a small corpus is cheap and exact.
            if len(corpus) > _SMALL_DOCUMENTS:
                texts[name] = corpus.select(range(_SAMPLE_DOCUMENTS))
    eval_blocks = None
    with machine_first():
        if evaluated:
            eval_blocks = pack_evaluation(job, models, evaluated, named("eval_dataset")).blocks
        packed = pack_training(job, models, texts, named("dataset"))
    packed.blocks.weights = data.dataset_weights
    files = []
    for name, corpus in [*texts.items(), *evaluated.items()]:
        if corpus.info.description:
            files.append(f"{Path(name).name}: {corpus.info.description}")
    eval_blocks = eval_blocks or packed.eval_blocks
    packed = replace(packed, eval_blocks=eval_blocks, totals=totals, files=files)
    steps = epoch_steps(job, packed)
    # With fewer steps, an epoch's step is lowered, if that may be, or rejected. If the user has
    # chosen the number of steps, any epoch with one will do.
    may_lower = job.may_lower_step and args.max_steps <= 0
    least_steps = max(may_lower * MIN_STEPS / args.num_train_epochs, 1.0)
    # A sample cannot show that a corpus is too small. Only the whole corpus can.
    if sample and not packed.is_whole and steps is not None and steps < max(least_steps, 2.0):
        return pack_documents(job, models, corpora)
    if packed.is_whole and (steps or 0) < least_steps:
        if job.may_lower_step:
            args.lower_step(epoch_sequences(packed) or 0)
        check_enough(packed.blocks, args, f"{named('dataset')} {' '.join(data.dataset)}")
    return packed


def epoch_sequences(packed: Packed) -> int | None:
    """Return the packed sequences of an epoch, extrapolated from a sample, or None if unknown."""
    sizes, weights = packed.expected_sequences(), packed.blocks.weights
    if sizes is None:
        return None
    # With weights, an epoch may read the sequences of a corpus several times.
    return int(sum(sizes) if weights is None else mixed_counts(sizes, weights).sum())


def epoch_steps(job: Job, packed: Packed) -> int | None:
    """Return the optimizer steps of an epoch, extrapolated from a sample, or None if unknown."""
    sequences = epoch_sequences(packed)
    if sequences is None:
        return None
    # A step is a whole number of sequences. An incomplete step at the end of an epoch is not read.
    return sequences // (job.args.global_batch_tokens // job.args.max_length)


def steps_of(job: Job, packed: Packed) -> int | None:
    """Return the optimizer steps of a run, or None if the size of its corpus is unknown."""
    if job.args.max_steps > 0:
        return job.args.max_steps
    steps = epoch_steps(job, packed)
    return None if steps is None else math.ceil(job.args.num_train_epochs * steps)


def check_enough(blocks: Blocks, args: VocAgnoConfig, corpus_name: str) -> None:
    """Reject a corpus with fewer packed sequences than one optimizer step needs."""
    needed = args.global_batch_tokens // args.max_length
    if len(blocks) >= needed:
        return
    sequences = "1 sequence" if len(blocks) == 1 else f"{len(blocks):,} sequences"
    advice, step = "lower one of these, or give more documents", args.step_for(len(blocks))
    steps = len(blocks) * args.max_length // step
    if steps:
        advice = f"with {named('global_batch_tokens')} {step}, an epoch has {steps:,} steps"
    raise ValueError(
        f"{corpus_name} makes {sequences} of {args.max_length} tokens, and one optimizer step "
        f"needs {needed:,}, as {args.batch_arithmetic()}: {advice}"
    )


# -- The one way from documents to packed sequences ----------------------------------------------


def pack_training(
    job: Job, models: Models, texts: Mapping[str, datasets.Dataset], argument: str
) -> Packed:
    """Align and pack corpora to train on, without what is held out."""
    args = job.args
    if args.method == "chunk" and any(is_conversations(corpus) for corpus in texts.values()):
        raise OptionError("method", CHUNK_NEEDS_DOCUMENTS)
    return pack_corpora(
        texts,
        models.student_reader,
        models.teacher_readers,
        args,
        argument,
        held_out=job.data.eval_fraction,
        # As in Trainer: `seed` unless `data_seed` is given.
        seed=args.seed if args.data_seed is None else args.data_seed,
    )


def pack_evaluation(
    job: Job, models: Models, texts: Mapping[str, datasets.Dataset], argument: str
) -> Packed:
    """Align and pack a corpus to evaluate on."""
    # A store has only the documents on which it was scored, and an evaluation needs no teacher.
    teachers = models.teacher_readers if job.model.teacher else None
    return pack_corpora(texts, models.student_reader, teachers, job.args, argument)


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
    """Align the documents of each corpus, and pack them.

    `argument` is what names the corpora in messages. A share of each corpus may be held out for an
    evaluation.

    Raises:
        ValueError: a corpus has no usable document, or a store lacks some.
    """
    aligned = []
    evaluated = []
    for name, corpus in texts.items():
        label = f"{argument} {name}".strip()
        segments = _align(corpus, student, teachers, options, label)
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
    names = short_names(list(texts))
    segments, blocks = _pack(aligned, names, student.limit, limits)
    eval_blocks = None
    if held_out:
        _, eval_blocks = _pack(evaluated, names, student.limit, limits)
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
        totals=[len(corpus) for corpus in texts.values()],
        skipped=skipped,
    )


def _align(
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
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    remedy = "What is aligned stays: set HF_DATASETS_CACHE to another disk"
    with explain_full_disk(cache, lambda: remedy):
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
    if len(segments.weights):
        log_main(f"{name}: {segments.describe_weights()}")
    return segments


def _pack(
    parts: Sequence[Segments],
    names: Sequence[str],
    max_length: int,
    limits: Sequence[int],
) -> tuple[Segments, Blocks]:
    """Pack the segments of one corpus, or of each of several, which become one table."""
    segments, sizes = parts[0], None
    if len(parts) > 1:
        rows = []
        skipped = []
        sizes = {}
        is_weighted = any(len(part.weights) for part in parts)
        for name, part in zip(names, parts, strict=True):
            rows.append(part.with_weights() if is_weighted else part.rows)
            skipped += part.skipped
            sizes[name] = len(part.rows)
        segments = Segments(datasets.concatenate_datasets(rows), skipped)
    blocks = Blocks(segments.rows, max_length, limits, sizes)
    # Held-out documents are not in these segments, so a run resumes only with the same ones.
    blocks.corpus_digest = [part.digest() for part in parts]
    return segments, blocks


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


# -- For the trainer -----------------------------------------------------------------------------


def make_collator(
    args: VocAgnoConfig, packed: Packed, collator: PackedCollator | None
) -> PackedCollator:
    """Return the user's collator if it suits the run, or else one for the packed sequences.

    Raises:
        ValueError: it would compute something else, or there is none for such a dataset.
    """
    method, dataset = args.guidance, packed.blocks
    # A trainer may be made for an evaluation alone.
    if dataset is None:
        dataset = packed.eval_blocks
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    expected: dict[str, Any] = {"chunks": method.chunks if method.method == "chunk" else None}
    if isinstance(dataset, Blocks):
        expected["max_length"] = args.max_length
        expected["attend_across_documents"] = args.attend_across_documents
        if collator is None:
            return PackedCollator(
                teacher_max_length=dataset.teacher_max_length,
                shares=method.aggregation_in_effect == "share",
                **expected,
            )
    if not isinstance(collator, PackedCollator):
        raise ValueError(
            f"train_dataset must be documents or the Blocks of prepare_dataset, got "
            f"{type(dataset).__name__}; with others, data_collator must be a PackedCollator"
        )
    for name, value in expected.items():
        if getattr(collator, name) != value:
            raise ValueError(f"data_collator must be PackedCollator(..., {name}={value})")
    return collator


def settings_of_data(job: Job, models: Models | None, packed: Packed) -> dict[str, Any]:
    """Return what the documents add to a run's settings, because progress is counted in them."""
    args, settings = job.args, dict[str, Any]()
    # Other packed sequences, such as a list, have no digest. The user answers for their order.
    if isinstance(packed.blocks, Blocks):
        settings["blocks"] = len(packed.blocks)
        settings["corpus_digest"] = packed.blocks.corpus_digest
    readers = models.teacher_readers if models else None
    # A template determines the tokens of a conversation, and its file may change.
    if models and any(is_conversations(texts) for texts in packed.texts.values()):
        templates = [models.student_reader.template]
        templates += [reader.template for reader in readers.readers] if readers else []
        settings["chat_templates_sha256"] = hashlib.sha256(repr(templates).encode()).hexdigest()
    # A store may keep its name while its losses are scored again, so keep their hash.
    if job.model.teacher_losses and readers:
        settings["teacher_losses_sha256"] = readers.fingerprint()
    # A resumed run compares the losses of an evaluation that steers it with those before.
    steers = (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    )
    if steers:
        parts = (
            packed.eval_blocks if isinstance(packed.eval_blocks, dict) else {"": packed.eval_blocks}
        )
        # Trainer would look for the metric after the first evaluation, and before the first save.
        metric = (args.metric_for_best_model or "loss").removeprefix("eval_")
        if not any(metric.startswith(f"{name}_" if name else "") for name in parts):
            losses = ", ".join(f"{name}_loss" for name in parts)
            raise OptionError("metric_for_best_model", f"must be one of {losses}, got {metric}")
        digests = {name: getattr(part, "corpus_digest", None) for name, part in parts.items()}
        settings["evaluation"] = {"metric": args.metric_for_best_model, "documents": digests}
    return settings
