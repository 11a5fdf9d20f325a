"""How well the tokenizers of a student and of teachers fit, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Words in common, what the token-level map is made of on every document, the overlap of chunks of
equal token count (Figure 3 of the paper), and the documents that fit worst. What each number means:
docs/audit.md. Exit status: 0, or 2 for a wrong argument or file.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import datasets
import numpy as np
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.analysis.audit_report import draw, markdown
from vocagnolm.analysis.overlap import (
    MapCounts,
    byte_overlap,
    chunk_overlaps,
    count_map,
    raw_overlap,
)
from vocagnolm.corpus import TEXT, load_corpus, load_sample, unusable, values
from vocagnolm.host.files import check_writable, write_file, write_json
from vocagnolm.spans import Spans, encode, encode_batch
from vocagnolm.tokenizers import load_tokenizer, tokenizer_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 1  # of audit.json
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCH = 128  # documents that are in memory at once
_BEGINNING = 60  # characters shown of a document
_BETWEEN = "\n\n"  # of the documents of a sequence


@dataclass(frozen=True)
class Settings:
    """How to sample sequences for chunks, and how much to tell.

    Attributes:
        sequence_length: student tokens per sequence.
        sequences: how many of them, at most.
        chunks: numbers of chunks of a sequence.
        worst: documents to name per teacher.
        seed: of the order in which documents are put into sequences.
    """

    sequence_length: int = 2048
    sequences: int = 150
    chunks: Sequence[int] = CHUNKS
    worst: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sequence_length < 1 or self.sequences < 1 or self.worst < 0:
            raise ValueError(
                "expected --sequence_length and --sequences of at least 1 and --worst of at least"
                f" 0, found {self.sequence_length}, {self.sequences} and {self.worst}: give others"
            )
        if not all(1 <= chunks <= self.sequence_length for chunks in self.chunks):
            raise ValueError(
                f"expected --chunks between 1 and --sequence_length {self.sequence_length}, found"
                f" {' '.join(map(str, self.chunks))}: a chunk needs a token, so give others"
            )


@dataclass(frozen=True)
class Named:
    """A tokenizer and the name it was loaded by."""

    name: str
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Document:
    number: int
    text: str


@dataclass
class _Tally:
    """What adds up over documents for one teacher; `worst` is a heap with its best fit on top."""

    kept: int
    counts: MapCounts = field(default_factory=MapCounts)
    worst: list[tuple[float, int, dict[str, Any]]] = field(default_factory=list)

    def add(self, document: _Document, student_spans: Spans, teacher_spans: Spans) -> None:
        ranges = align_spans(student_spans, teacher_spans)
        counts = count_map(len(document.text), student_spans, teacher_spans, ranges)
        self.counts += counts
        if counts.iou == 1:
            return
        about = {
            "document": document.number,
            "iou": counts.iou,
            "ios": counts.ios,
            "mapped": 1 - counts.unmapped / counts.student_tokens,
            "student_tokens": counts.student_tokens,
            "teacher_tokens": counts.teacher_tokens,
            "beginning": document.text[:_BEGINNING],
        }
        heapq.heappush(self.worst, (-counts.iou, -document.number, about))
        if len(self.worst) > self.kept:
            heapq.heappop(self.worst)

    def worst_first(self) -> list[dict[str, Any]]:
        return [about for *_, about in sorted(self.worst, reverse=True)]


def audit(
    student: Named, teachers: Sequence[Named], corpus: datasets.Dataset, settings: Settings
) -> dict[str, Any]:
    """Measure how the tokens of a student and of each teacher lie on the documents of a corpus.

    Documents that are no text, or in which a tokenizer finds no token, are left out for all.

    Args:
        student: as `tokenizers.load_tokenizer` loads it.
        teachers: likewise, at least one.
        corpus: documents in the column `text`.
        settings: of the sequences and the report.

    Returns:
        The content of `audit.json`; all shares are in [0, 1].

    Raises:
        ValueError: no document of the corpus can be read.
    """
    tokenizers = [student.tokenizer, *(teacher.tokenizer for teacher in teachers)]
    tallies = [_Tally(settings.worst) for _ in teachers]
    documents, unreadable = 0, set[int]()
    numbers = tqdm(range(len(corpus)), desc="documents", disable=None)
    for batch in _batches(corpus, numbers):
        unreadable |= {document.number for document in batch}
        for document, (ours, *theirs) in _encode(tokenizers, batch):
            documents += 1
            unreadable.remove(document.number)
            for tally, teacher_spans in zip(tallies, theirs, strict=True):
                tally.add(document, ours, teacher_spans)
    if not documents:
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, each of them empty, not text"
            " or without tokens; give another one, or another --text_column"
        )
    readable = [number for number in range(len(corpus)) if number not in unreadable]
    sampled = list(_sequences(corpus, readable, student.tokenizer, settings))
    if not sampled:
        logger.warning(
            "no sequence of %d student tokens in %d documents, so no chunks: lower"
            " --sequence_length",
            *(settings.sequence_length, documents),
        )
    return {
        "format": FORMAT,
        "student": student.name,
        "student_sha256": tokenizer_sha256(student.tokenizer),
        "documents": documents,
        "skipped": len(corpus) - documents,
        "sequences": len(sampled),
        "settings": asdict(settings),
        "teachers": [
            _about(student, teacher, tally, _chunks(teacher, sampled, settings.chunks))
            for teacher, tally in zip(teachers, tallies, strict=True)
        ],
    }


def _about(
    student: Named, teacher: Named, tally: _Tally, chunks: list[dict[str, Any]]
) -> dict[str, Any]:
    counts = tally.counts
    raw = raw_overlap(student.tokenizer, teacher.tokenizer)
    decoded = byte_overlap(student.tokenizer, teacher.tokenizer)
    return {
        "teacher": teacher.name,
        "teacher_sha256": tokenizer_sha256(teacher.tokenizer),
        "vocabulary_overlap": {
            "raw": {**raw.shares(), **asdict(raw)},
            "bytes": {**decoded.shares(), **asdict(decoded)},
        },
        "mapping": counts.shares(),
        "token_level": {"iou": counts.iou, "ios": counts.ios},
        "chunks": chunks,
        "counts": asdict(counts),
        "worst": tally.worst_first(),
    }


def _batches(corpus: datasets.Dataset, numbers: Iterable[int]) -> Iterator[list[_Document]]:
    """The usable ones of some documents, in the order of their numbers here."""
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    batch: list[int] = []
    for number in numbers:
        batch.append(number)
        if len(batch) == _BATCH:
            yield _read(corpus, batch)
            batch = []
    if batch:
        yield _read(corpus, batch)


def _read(corpus: datasets.Dataset, numbers: list[int]) -> list[_Document]:
    texts = values(corpus[numbers][TEXT])
    return [
        _Document(number, text)
        for number, text in zip(numbers, texts, strict=True)
        if not unusable(text)
    ]


def _encode(
    tokenizers: Sequence[PreTrainedTokenizerBase], documents: list[_Document]
) -> Iterator[tuple[_Document, list[Spans]]]:
    """Spans of each document by each tokenizer; documents that one of them cannot read are out."""
    texts = [document.text for document in documents]
    try:
        encodings = [encode_batch(tokenizer, texts) for tokenizer in tokenizers]
    except ValueError as error:
        if len(documents) == 1:
            logger.warning("document %d is left out: %s", documents[0].number, error)
            return
        for document in documents:  # which one is it?
            yield from _encode(tokenizers, [document])
        return
    for document, *found in zip(documents, *encodings, strict=True):
        if all(len(encoding.ids) for encoding in found):
            yield document, [encoding.spans for encoding in found]


def _sequences(
    corpus: datasets.Dataset,
    numbers: Iterable[int],
    student: PreTrainedTokenizerBase,
    settings: Settings,
) -> Iterator[tuple[str, Spans]]:
    """Texts of as many student tokens as asked for, and the characters of these tokens.

    Whole documents in random order, with a blank line between them, until there are enough tokens;
    the text ends with the last one.
    """
    order = list(numbers)
    random.Random(settings.seed).shuffle(order)
    parts: list[str] = []
    tokens = made = 0
    for batch in _batches(corpus, order):
        for document, (spans,) in _encode([student], batch):
            parts.append(document.text)
            tokens += len(spans)
            if tokens < settings.sequence_length:
                continue
            joined = _BETWEEN.join(parts)
            kept = encode(student, joined).spans[: settings.sequence_length]
            if len(kept) < settings.sequence_length:
                continue  # tokens were merged where documents meet
            yield joined[: kept[-1, 1]], kept
            made += 1
            if made == settings.sequences:
                return
            parts, tokens = [], 0


def _chunks(
    teacher: Named, sampled: Sequence[tuple[str, Spans]], numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Mean IoU and IoS over sequences for each number of chunks, with their standard errors."""
    if not sampled:
        return []
    pairs = [(ours, encode(teacher.tokenizer, text).spans) for text, ours in sampled]
    found = []
    for chunks in numbers:
        overlaps = (chunk_overlaps(ours, theirs, chunks) for ours, theirs in pairs)
        means = np.array([[iou.mean(), ios.mean()] for iou, ios in overlaps])
        iou, ios = means.mean(axis=0).tolist()
        about: dict[str, Any] = {"chunks": chunks, "iou": iou, "ios": ios}
        if len(means) > 1:
            errors = means.std(axis=0, ddof=1) / math.sqrt(len(means))
            about["iou_standard_error"], about["ios_standard_error"] = errors.tolist()
        found.append(about)
    return found


class _OneLineErrors(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _OneLineErrors(
        prog="vocagnolm audit",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Settings()
    add = parser.add_argument
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    add("--dataset", required=True, help="As for train.py: files, a directory, or a hub name.")
    add("--dataset_config", help="Configuration of a hub dataset.")
    add("--dataset_split", default="train", help="Split of a hub dataset.")
    add("--text_column", default=TEXT, help="Column that holds the text.")
    add("--documents", type=int, help="Only the first ones; default: all.")
    add(
        "--sequence_length",
        type=int,
        default=defaults.sequence_length,
        help="Student tokens of a sequence that is cut into chunks.",
    )
    add("--sequences", type=int, default=defaults.sequences, help="How many, at most.")
    add("--chunks", type=int, nargs="+", default=CHUNKS, help="Numbers of chunks of a sequence.")
    add("--seed", type=int, default=defaults.seed, help="Of the documents' order in sequences.")
    add("--worst", type=int, default=defaults.worst, help="Documents to name per teacher.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.documents is not None and arguments.documents < 1:
        raise ValueError(f"--documents must be at least 1, got {arguments.documents}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Audit from the command line and return the exit status: 0, or 2 for a wrong argument."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        arguments = parse(argv)
        if arguments.output_dir:
            check_writable(arguments.output_dir)
        content = _run(arguments)
        if arguments.output_dir:
            write(content, arguments.output_dir)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"vocagnolm audit: error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(markdown(content))
    return 0


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        arguments.sequence_length,
        arguments.sequences,
        arguments.chunks,
        arguments.worst,
        arguments.seed,
    )
    trust = arguments.trust_remote_code
    student = Named(
        arguments.student, load_tokenizer(arguments.student, "student", trust_remote_code=trust)
    )
    teachers = [
        Named(name, load_tokenizer(name, "teacher", trust_remote_code=trust))
        for name in arguments.teacher
    ]
    options = {
        "split": arguments.dataset_split,
        "text_column": arguments.text_column,
        "config_name": arguments.dataset_config,
    }
    if arguments.documents is None:
        corpus = load_corpus(arguments.dataset, **options)
    else:
        corpus, _ = load_sample(arguments.dataset, arguments.documents, **options)
    return {"dataset": arguments.dataset, **options, **audit(student, teachers, corpus, settings)}


def write(content: dict[str, Any], directory: Path) -> None:
    """Write `audit.json`, `audit.md` and `audit.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "audit.json", content)
    write_file(directory / "audit.md", lambda file: file.write(markdown(content).encode()))
    draw(content, directory / "audit.png")
