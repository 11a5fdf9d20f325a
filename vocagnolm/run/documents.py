"""From the corpus of a job to the blocks that it trains and evaluates on."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import datasets

from vocagnolm.corpus import load_corpus, load_sample
from vocagnolm.data import Segments, align_corpus
from vocagnolm.host.command import corpus_options
from vocagnolm.host.processes import first_of_machine_first
from vocagnolm.packing import Blocks
from vocagnolm.run.arguments import DataArguments
from vocagnolm.run.job import Job
from vocagnolm.run.pair import Pair
from vocagnolm.segmentation import MISSING

# Documents that a plan is made from, unless a corpus has few enough to read them all.
_SAMPLE_DOCUMENTS, _SMALL_DOCUMENTS = 1000, 10_000


@dataclass(frozen=True)
class Documents:
    """Documents of a job, read, aligned and packed; in a sample only the first ones."""

    # With the documents that are held out.
    corpus: datasets.Dataset
    # To train on: aligned, and packed.
    segments: Segments
    blocks: Blocks
    # Documents of the whole dataset; None if the hub does not say.
    total: int | None
    # To evaluate on, if there is something.
    held_out: Segments | None = None
    eval_blocks: Blocks | None = None

    @property
    def is_whole(self) -> bool:
        """False if only the first documents of the dataset were read."""
        return self.total == len(self.corpus)

    @property
    def scale(self) -> float:
        """How many times as large the dataset is as what was read of it, 1 if nobody knows."""
        return (self.total or len(self.corpus)) / len(self.corpus)

    def settings(self, pair: Pair) -> dict[str, object]:
        """Return what the corpus adds to the settings of a run: progress is counted in blocks."""
        read = {"corpus_digest": self.segments.digest(), "blocks": len(self.blocks)}
        if pair.is_stored and pair.guide:
            return read | {"teacher_losses_sha256": pair.guide.fingerprint()}
        return read

    def write_skipped(self, output_dir: str | Path) -> None:
        """List the documents that were left out, with the reasons."""
        self.segments.write_skipped(Path(output_dir) / "skipped.jsonl")
        if self.held_out is not None:
            self.held_out.write_skipped(Path(output_dir) / "eval_skipped.jsonl")


def load_documents(job: Job, pair: Pair, *, sample: bool = False) -> Documents:
    """Align and pack the corpus; the first process of a machine works, the others read its cache.

    A `sample` is of the first documents, unless the corpus is small, or may be too small.

    Raises:
        ValueError: a document has no stored losses, or there is too little to train on.
    """
    # First: a wrong name is told before the corpus is aligned.
    evaluated = _read_evaluated(job.data)
    corpus, segments, total = _align(job, pair, sample=sample)
    segments, held_out = _hold_out(job, pair, segments, evaluated)
    length, rows = job.data.max_length, pair.teacher_rows
    blocks = Blocks(segments.rows, length, rows)
    eval_blocks = None if held_out is None else Blocks(held_out.rows, length, rows)
    found = Documents(corpus, segments, blocks, total, held_out, eval_blocks)
    # A smaller corpus would make no optimizer step at all.
    per_step = job.run.global_batch_tokens // length
    if found.is_whole and len(blocks) < per_step:
        raise ValueError(
            f"--dataset {job.data.dataset} makes {len(blocks):,} blocks of {length} tokens, "
            f"one optimizer step needs {per_step:,}: lower --global_batch_tokens to at most "
            f"{len(blocks) * length}"
        )
    if sample and total and not found.is_whole and len(blocks) * found.scale < 2 * per_step:
        return load_documents(job, pair)
    return found


def _align(job: Job, pair: Pair, *, sample: bool) -> tuple[datasets.Dataset, Segments, int | None]:
    """Read and align the corpus or its first documents, with the number of all documents."""
    data = job.data
    with first_of_machine_first():
        corpus, total = _read(job, sample=sample)
        processes = data.processes(len(corpus))
        segments = align_corpus(corpus, pair.student_reader, pair.guide, num_proc=processes)
    missing = sum(reason == MISSING for _, reason in segments.skipped)
    if missing and data.missing_losses == "error":
        raise ValueError(
            f"--teacher_losses lacks {missing:,} of {len(corpus):,} documents of --dataset "
            f"{data.dataset}, or has another text of them: score this corpus, or leave them out "
            "with --missing_losses skip"
        )
    if not len(segments.rows):
        raise ValueError(
            f"--dataset {data.dataset} has no usable document: {len(corpus):,} read, "
            f"{len(segments.skipped):,} skipped ({skip_reasons(segments)})"
        )
    return corpus, segments, total


def _read(job: Job, *, sample: bool) -> tuple[datasets.Dataset, int | None]:
    data, options = job.data, corpus_options(job.data)
    if sample and job.run.dry_run:
        # Of a corpus of the hub, without the rest.
        corpus, total = load_sample(data.dataset, _SAMPLE_DOCUMENTS, **options)
        if total is None or total > _SMALL_DOCUMENTS:
            return corpus, total
    corpus = load_corpus(data.dataset, **options)
    total = len(corpus)
    if sample and total > _SMALL_DOCUMENTS:
        corpus = corpus.select(range(_SAMPLE_DOCUMENTS))
    return corpus, total


def _read_evaluated(data: DataArguments) -> datasets.Dataset | None:
    if not data.eval_dataset:
        return None
    with first_of_machine_first():
        named = {"text_column": data.text_column, "option": "--eval_dataset"}
        return load_corpus(data.eval_dataset, **named)


def _hold_out(
    job: Job, pair: Pair, segments: Segments, evaluated: datasets.Dataset | None
) -> tuple[Segments, Segments | None]:
    """Return the segments to train on, and those to evaluate on, if any."""
    data, run = job.data, job.run
    if evaluated is not None:
        # A store knows other documents only, and evaluation needs no teacher.
        guide = None if pair.is_stored else pair.guide
        with first_of_machine_first():
            processes = data.processes(len(evaluated))
            held_out = align_corpus(evaluated, pair.student_reader, guide, num_proc=processes)
        if not len(held_out.rows):
            raise ValueError(f"--eval_dataset {data.eval_dataset} has no usable document")
        return segments, held_out
    if not data.eval_fraction:
        return segments, None
    # The seed of the data, as Trainer reads it.
    seed = run.seed if run.data_seed is None else run.data_seed
    rest, held_out = segments.split(data.eval_fraction, seed)
    if not len(rest.rows):
        raise ValueError(
            f"--eval_fraction {data.eval_fraction} leaves no document of {data.dataset} to train "
            "on: lower it, or evaluate on other documents with --eval_dataset"
        )
    return rest, held_out


def skip_reasons(segments: Segments) -> str:
    """Return the three most frequent reasons for leaving a document out, with counts."""
    reasons = Counter(reason for _, reason in segments.skipped)
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))
