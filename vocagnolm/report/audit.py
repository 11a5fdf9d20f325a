"""Measure how well the tokenizers of a student and of teachers fit, before any model is loaded."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import datasets
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.chat.columns import conversations_of, is_conversations
from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import template_of
from vocagnolm.host.options import checked
from vocagnolm.io import JsonObject, write_json, write_text
from vocagnolm.readers import Reader
from vocagnolm.report.audit_report import audit_markdown, draw_audit
from vocagnolm.report.overlap import (
    chunk_overlaps,
    count_map,
    decoded_vocabulary,
    map_shares,
    mean_overlaps,
    vocabulary_overlap,
)
from vocagnolm.spans import encode, encode_batch
from vocagnolm.texts.column import TEXT, unusable, values
from vocagnolm.texts.tokenizers import Role, tokenizer_sha256
from vocagnolm.texts.tokens import Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Documents that are in memory at once.
_BATCH = 128

# A number in the corpus, and a text or, with how both kinds of models read it, a conversation.
_Document = tuple[int, str | Conversation]
_Read = Callable[[Sequence[Any]], list[Spans]]


@checked
@dataclass(frozen=True)
class AuditSettings:
    """Sizes of an audit."""

    # Student tokens of a sequence that is cut into chunks.
    sequence_length: int = 2048
    # Their number, at most.
    sequences: int = 150
    # Numbers of chunks of a sequence.
    chunks: Sequence[int] = (2, 4, 8, 16, 32, 64, 128, 256, 512)
    # Documents to name per teacher.
    worst: int = 10
    # Order in which documents are put into sequences.
    seed: int = 0

    def __post_init__(self) -> None:
        if (most := max(self.chunks, default=0)) > self.sequence_length:
            tokens = f"--sequence_length {self.sequence_length}"
            raise ValueError(f"--chunks {most} exceeds {tokens}: a chunk needs a token")


class Named(NamedTuple):
    """A tokenizer and the name it was loaded by.

    Conversations are read in its own chat template, or another one.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    template: str | None = None

    def reader(self, role: Role) -> Reader:
        """Return how a model with it reads conversations."""
        template = template_of(self.tokenizer, role, self.template)
        reader = Reader(self.tokenizer, 0, 0 if role == "student" else None, 0, template)
        reader.check_template()
        return reader


@dataclass
class _Tally:
    """Running totals for one teacher, and its worst documents, the worst one first."""

    kept: int
    counts: dict[str, float] = field(default_factory=dict)
    worst: list[JsonObject] = field(default_factory=list)

    def add(self, document: _Document, student_spans: Spans, teacher_spans: Spans) -> None:
        number, content = document
        text = content if isinstance(content, str) else content.text
        ranges = align_spans(student_spans, teacher_spans)
        counts = count_map(len(text), student_spans, teacher_spans, ranges)
        self.counts = {name: self.counts.get(name, 0) + x for name, x in counts.items()}
        means = mean_overlaps(counts)
        if means["iou"] == 1:
            return
        about = {
            "document": number,
            **means,
            "mapped": 1 - counts["unmapped"] / counts["student_tokens"],
            "student_tokens": counts["student_tokens"],
            "teacher_tokens": counts["teacher_tokens"],
            "beginning": text[:60],
        }
        worst = sorted([*self.worst, about], key=lambda one: (one["iou"], one["document"]))
        self.worst = worst[: self.kept]


def audit(
    student: Named, teachers: Sequence[Named], corpus: datasets.Dataset, settings: AuditSettings
) -> JsonObject:
    """Measure how the tokens of a student and of each teacher lie on the documents of a corpus.

    Documents that are no text, or in which a tokenizer finds no token, are left out for all. Of
    conversations the tokens of contents count, as each chat template has them, and there are no
    chunks.

    Returns:
        The content of `audit.json`; all shares are in [0, 1].

    Raises:
        ValueError: no document of the corpus can be read.
    """
    reads = [partial(_read, one.tokenizer) for one in (student, *teachers)]
    if is_turns := is_conversations(corpus):
        readers = [student.reader("student"), *(one.reader("teacher") for one in teachers)]
        reads = [partial(_read_turns, reader) for reader in readers]
    tallies = [_Tally(settings.worst) for _ in teachers]
    documents, rejected = 0, set[int]()
    numbers = tqdm(range(len(corpus)), desc="documents", disable=None)
    for batch in _batches(corpus, numbers):
        rejected |= {number for number, _ in batch}
        for document, (ours, *theirs) in _encode(reads, batch):
            documents += 1
            rejected.remove(document[0])
            for tally, teacher_spans in zip(tallies, theirs, strict=True):
                tally.add(document, ours, teacher_spans)
    if not documents:
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, each of them empty, not text"
            " or without tokens; give another one, or another --text_column"
        )
    # Numbers without a text keep their place: the order is drawn from all that none rejects.
    numbers = (number for number in range(len(corpus)) if number not in rejected)
    sampled = [] if is_turns else [*_sequences(corpus, numbers, student.tokenizer, settings)]
    if not (sampled or is_turns):
        text = "no sequence of %d student tokens in %d documents, so no chunks: lower %s"
        logger.warning(text, settings.sequence_length, documents, "--sequence_length")
    return {
        "format": 1,
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


def _about(student: Named, teacher: Named, tally: _Tally, chunks: list[JsonObject]) -> JsonObject:
    counts = tally.counts
    both = (student.tokenizer, teacher.tokenizer)
    words = {
        "raw": vocabulary_overlap(*(set(tokenizer.get_vocab()) for tokenizer in both)),
        "bytes": vocabulary_overlap(*map(decoded_vocabulary, both)),
    }
    return {
        "teacher": teacher.name,
        "teacher_sha256": tokenizer_sha256(teacher.tokenizer),
        "vocabulary_overlap": words,
        "mapping": map_shares(counts),
        "token_level": mean_overlaps(counts),
        "chunks": chunks,
        "counts": counts,
        "worst": tally.worst,
    }


def _batches(corpus: datasets.Dataset, numbers: Iterable[int]) -> Iterator[list[_Document]]:
    """Read some documents, in the order given; yield those that are text."""
    if corpus.features[TEXT] == datasets.Value("string"):
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    rest = iter(numbers)
    while batch := list(itertools.islice(rest, _BATCH)):
        if is_conversations(corpus):
            yield [*conversations_of(corpus[batch], batch)[0].items()]
            continue
        documents = zip(batch, values(corpus[batch][TEXT]), strict=True)
        yield [(number, text) for number, text in documents if not unusable(text)]


def _read(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Spans]:
    return [one.spans for one in encode_batch(tokenizer, texts)]


def _read_turns(reader: Reader, conversations: Sequence[Conversation]) -> list[Spans]:
    found = []
    for read in reader.read_turns(conversations, "all"):
        if isinstance(read, str):
            raise ValueError(read)
        # Those of the template have no characters.
        found.append(read.spans[read.spans[:, 0] < read.spans[:, 1]])
    return found


def _encode(
    reads: Sequence[_Read], documents: list[_Document]
) -> Iterator[tuple[_Document, list[Spans]]]:
    """Read a batch in every way; skip documents that one of them cannot read."""
    try:
        texts = [text for _, text in documents]
        encodings = [read(texts) for read in reads]
    except ValueError as error:
        if len(documents) == 1:
            logger.warning("document %d is left out: %s", documents[0][0], error)
            return
        # One document spoils its batch: find it by encoding each alone.
        for document in documents:
            yield from _encode(reads, [document])
        return
    for document, *found in zip(documents, *encodings, strict=True):
        if all(map(len, found)):
            yield document, found


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
    tokens, made, read = 0, 0, partial(_read, student)
    found = (pair for batch in _batches(corpus, order) for pair in _encode([read], batch))
    for (_, text), (spans,) in found:
        parts.append(str(text))
        tokens += len(spans)
        if tokens < settings.sequence_length:
            continue
        joined = "\n\n".join(parts)
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
) -> list[JsonObject]:
    """Average IoU and IoS over sequences for each number of chunks, with standard errors."""
    pairs = [(ours, encode(teacher.tokenizer, text).spans) for text, ours in sampled]
    found: list[JsonObject] = []
    for chunks in numbers if pairs else ():
        overlaps = [map(np.mean, chunk_overlaps(*pair, chunks)) for pair in pairs]
        means = pd.DataFrame(overlaps, columns=["iou", "ios"])
        # A single sequence has no standard error.
        errors = means.sem().dropna().add_suffix("_standard_error")
        found.append({"chunks": chunks, **means.mean(), **errors})
    return found


def write_audit(content: JsonObject, directory: Path) -> None:
    """Write `audit.json`, `audit.md` and `audit.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "audit.json", content)
    write_text(directory / "audit.md", audit_markdown(content))
    draw_audit(content, directory / "audit.png")
