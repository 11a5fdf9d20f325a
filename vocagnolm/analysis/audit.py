"""Measure how well the tokenizers of a student and of teachers fit, before any model is loaded."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import datasets
import numpy as np
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.analysis.audit_report import Content, audit_markdown, draw_audit
from vocagnolm.analysis.overlap import (
    MapCounts,
    byte_overlap,
    chunk_overlaps,
    count_map,
    raw_overlap,
)
from vocagnolm.corpus import TEXT, unusable, values
from vocagnolm.host.files import write_file, write_json
from vocagnolm.spans import Spans, encode, encode_batch
from vocagnolm.tokenizers import tokenizer_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

AUDIT_FORMAT = 1  # of audit.json
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_BATCH = 128  # documents that are in memory at once
_BEGINNING = 60  # characters shown of a document
_BETWEEN = "\n\n"  # joins the documents of a sequence


@dataclass(frozen=True)
class AuditSettings:
    """Sizes of an audit.

    Attributes:
        sequence_length: student tokens of a sequence that is cut into chunks.
        sequences: their number, at most.
        chunks: numbers of chunks of a sequence.
        worst: documents to name per teacher.
        seed: order in which documents are put into sequences.
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
    """Running totals for one teacher, and a min-heap of its worst documents."""

    kept: int
    counts: MapCounts = field(default_factory=MapCounts)
    worst: list[tuple[float, int, Content]] = field(default_factory=list)

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
        # The best fit of those kept is on top, and leaves first.
        heapq.heappush(self.worst, (-counts.iou, -document.number, about))
        if len(self.worst) > self.kept:
            heapq.heappop(self.worst)


def audit(
    student: Named, teachers: Sequence[Named], corpus: datasets.Dataset, settings: AuditSettings
) -> Content:
    """Measure how the tokens of a student and of each teacher lie on the documents of a corpus.

    Documents that are no text, or in which a tokenizer finds no token, are left out for all.

    Args:
        student: tokenizer, as `load_tokenizer` loads it.
        teachers: at least one, likewise.
        corpus: documents in the column `text`.
        settings: sizes of the sequences and the report.

    Returns:
        The content of `audit.json`; all shares are in [0, 1].

    Raises:
        ValueError: no document of the corpus can be read.
    """
    tokenizers = [student.tokenizer, *(teacher.tokenizer for teacher in teachers)]
    tallies = [_Tally(settings.worst) for _ in teachers]
    readable: list[int] = []
    numbers = tqdm(range(len(corpus)), desc="documents", disable=None)
    for batch in _batches(corpus, numbers):
        for document, (ours, *theirs) in _encode(tokenizers, batch):
            readable.append(document.number)
            for tally, teacher_spans in zip(tallies, theirs, strict=True):
                tally.add(document, ours, teacher_spans)
    documents = len(readable)
    if not documents:
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, each of them empty, not text"
            " or without tokens; give another one, or another --text_column"
        )
    sampled = list(_sequences(corpus, readable, student.tokenizer, settings))
    if not sampled:
        logger.warning(
            "no sequence of %d student tokens in %d documents, so no chunks: lower"
            " --sequence_length",
            settings.sequence_length,
            documents,
        )
    return {
        "format": AUDIT_FORMAT,
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


def _about(student: Named, teacher: Named, tally: _Tally, chunks: list[Content]) -> Content:
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
        "worst": [about for *_, about in sorted(tally.worst, reverse=True)],
    }


def _batches(corpus: datasets.Dataset, numbers: Iterable[int]) -> Iterator[list[_Document]]:
    """Read the usable ones of some documents, in the order given."""
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    rest = iter(numbers)
    while batch := list(itertools.islice(rest, _BATCH)):
        texts = values(corpus[batch][TEXT])
        yield [
            _Document(number, text)
            for number, text in zip(batch, texts, strict=True)
            if not unusable(text)
        ]


def _encode(
    tokenizers: Sequence[PreTrainedTokenizerBase], documents: list[_Document]
) -> Iterator[tuple[_Document, list[Spans]]]:
    """Find the spans of each document by each tokenizer; skip documents that one cannot read."""
    texts = [document.text for document in documents]
    try:
        encodings = [encode_batch(tokenizer, texts) for tokenizer in tokenizers]
    except ValueError as error:
        if len(documents) == 1:
            logger.warning("document %d is left out: %s", documents[0].number, error)
            return
        # One document spoils its batch: find it by encoding each alone.
        for document in documents:
            yield from _encode(tokenizers, [document])
        return
    for document, *found in zip(documents, *encodings, strict=True):
        if all(len(encoding.ids) for encoding in found):
            yield document, [encoding.spans for encoding in found]


def _sequences(
    corpus: datasets.Dataset,
    numbers: Iterable[int],
    student: PreTrainedTokenizerBase,
    settings: AuditSettings,
) -> Iterator[tuple[str, Spans]]:
    """Yield texts of `sequence_length` student tokens, and the spans of these tokens.

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
            # Tokens may merge where documents meet; then there are too few, and one more is read.
            if len(kept) < settings.sequence_length:
                continue
            yield joined[: kept[-1, 1]], kept
            made += 1
            if made == settings.sequences:
                return
            parts, tokens = [], 0


def _chunks(
    teacher: Named, sampled: Sequence[tuple[str, Spans]], numbers: Sequence[int]
) -> list[Content]:
    """Average IoU and IoS over sequences for each number of chunks, with standard errors."""
    if not sampled:
        return []
    pairs = [(ours, encode(teacher.tokenizer, text).spans) for text, ours in sampled]
    found: list[Content] = []
    for chunks in numbers:
        overlaps = (chunk_overlaps(ours, theirs, chunks) for ours, theirs in pairs)
        means = np.array([[iou.mean(), ios.mean()] for iou, ios in overlaps])
        iou, ios = means.mean(axis=0).tolist()
        about: dict[str, float] = {"chunks": chunks, "iou": iou, "ios": ios}
        if len(means) > 1:
            errors = means.std(axis=0, ddof=1) / math.sqrt(len(means))
            about["iou_standard_error"], about["ios_standard_error"] = errors.tolist()
        found.append(about)
    return found


def write_audit(content: Content, directory: Path) -> None:
    """Write `audit.json`, `audit.md` and `audit.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "audit.json", content)
    write_file(directory / "audit.md", lambda file: file.write(audit_markdown(content).encode()))
    draw_audit(content, directory / "audit.png")
