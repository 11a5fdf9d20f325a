"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Tokens in common, the make-up of the token-level map on every document, the overlap of chunks of
equal token count (Figure 3 of the paper), and the documents that fit worst. docs/audit.md explains
every number. Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import template_of
from vocagnolm.cli import Parser, corpora_of, one_for_each, say, shell
from vocagnolm.io import JsonObject, check_writable, markdown_table, write_json, write_text
from vocagnolm.readers import Reader
from vocagnolm.report.overlap import (
    chunk_overlaps,
    count_map,
    decoded_vocabulary,
    map_shares,
    mean_overlaps,
    vocabulary_overlap,
)
from vocagnolm.report.plots import add_legend, dashes, new_plot, save_plot, series_style
from vocagnolm.spans import encode_batch
from vocagnolm.texts.column import TEXT, unusable, values
from vocagnolm.texts.tokenizers import Role, load_tokenizer, tokenizer_sha256
from vocagnolm.texts.tokens import Spans

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Documents that are in memory at once.
_BATCH = 128
# Chunks of a sequence.
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# An index in the corpus, and a text or a conversation.
_Document = tuple[int, str | Conversation]
_Read = Callable[[Sequence[Any]], list[Spans]]


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


def audit(
    student: Named,
    teachers: Sequence[Named],
    corpus: datasets.Dataset,
    *,
    sequence_length: int = 2048,
    sequences: int = 150,
    chunks: Sequence[int] = CHUNKS,
    worst: int = 10,
    seed: int = 0,
) -> JsonObject:
    """Measure how the tokens of a student and of each teacher lie on the documents of a corpus.

    Documents that are no text, or in which a tokenizer finds no token, are left out for all. Of
    conversations the tokens of contents count, as each chat template has them, and there are no
    chunks.

    Args:
        student: its tokenizer.
        teachers: their tokenizers.
        corpus: documents, in the column `text`.
        sequence_length: student tokens of a sequence that is cut into chunks.
        sequences: their number, at most.
        chunks: numbers of chunks of a sequence.
        worst: documents to name per teacher.
        seed: of the order in which documents are put into sequences.

    Returns:
        The content of `audit.json`; all shares are in [0, 1].

    Raises:
        ValueError: no document of the corpus can be read.
    """
    # Here, because --help needs none of what reads a corpus.
    from vocagnolm.chat.columns import is_conversations

    reads = [partial(_read, one.tokenizer) for one in (student, *teachers)]
    if is_turns := is_conversations(corpus):
        readers = [student.reader("student"), *(one.reader("teacher") for one in teachers)]
        reads = [partial(_read_turns, reader) for reader in readers]
    counts = [Counter[str]() for _ in teachers]
    worst_documents: list[list[JsonObject]] = [[] for _ in teachers]
    documents, rejected = 0, set[int]()
    for batch in _batches(corpus, tqdm(range(len(corpus)), desc="documents", disable=None)):
        rejected |= {index for index, _ in batch}
        for (index, content), (ours, *theirs) in _encode(reads, batch):
            documents += 1
            rejected.remove(index)
            text = content if isinstance(content, str) else content.text
            for place, spans in enumerate(theirs):
                found = count_map(len(text), ours, spans, align_spans(ours, spans))
                counts[place].update(found)
                if (means := mean_overlaps(found))["iou"] < 1:
                    named = worst_documents[place]
                    named.append(_about(index, text, found, means))
                    named.sort(key=lambda one: (one["iou"], one["document"]))
                    del named[worst:]
    if not documents:
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, each of them empty, not text"
            " or without tokens; give another one, or another --text_column"
        )
    # Indices without a text keep their place: the order is drawn from all that none rejects.
    order = [index for index in range(len(corpus)) if index not in rejected]
    random.Random(seed).shuffle(order)
    sampled: list[tuple[str, Spans]] = []
    if not is_turns:
        found_sequences = _sequences(corpus, order, student.tokenizer, sequence_length)
        sampled = list(itertools.islice(found_sequences, sequences))
        if not sampled:
            text = "no sequence of %d student tokens in %d documents, so no chunks: lower %s"
            logger.warning(text, sequence_length, documents, "--sequence_length")
    found_teachers = []
    for teacher, sums, named in zip(teachers, counts, worst_documents, strict=True):
        both = (student.tokenizer, teacher.tokenizer)
        raw = vocabulary_overlap(*(set(tokenizer.get_vocab()) for tokenizer in both))
        as_bytes = vocabulary_overlap(*map(decoded_vocabulary, both))
        found_teachers.append(
            {
                "teacher": teacher.name,
                "teacher_sha256": tokenizer_sha256(teacher.tokenizer),
                "vocabulary_overlap": {"raw": raw, "bytes": as_bytes},
                "mapping": map_shares(sums),
                "token_level": mean_overlaps(sums),
                "chunks": _chunks(teacher.tokenizer, sampled, chunks),
                "counts": dict(sums),
                "worst": named,
            }
        )
    return {
        "format": 1,
        "student": student.name,
        "student_sha256": tokenizer_sha256(student.tokenizer),
        "documents": documents,
        "skipped": len(corpus) - documents,
        "sequences": len(sampled),
        "teachers": found_teachers,
    }


def _about(index: int, text: str, counts: JsonObject, means: JsonObject) -> JsonObject:
    return {
        "document": index,
        **means,
        "mapped": 1 - counts["unmapped"] / counts["student_tokens"],
        "student_tokens": counts["student_tokens"],
        "teacher_tokens": counts["teacher_tokens"],
        "beginning": text[:60],
    }


def _batches(corpus: datasets.Dataset, indices: Iterable[int]) -> Iterator[list[_Document]]:
    """Read some documents, in the order given; yield those that are text."""
    from vocagnolm.chat.columns import conversations_of, is_conversations

    if getattr(corpus.features[TEXT], "dtype", None) == "string":
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    rest = iter(indices)
    while batch := list(itertools.islice(rest, _BATCH)):
        if is_conversations(corpus):
            yield [*conversations_of(corpus[batch], batch)[0].items()]
            continue
        documents = zip(batch, values(corpus[batch][TEXT]), strict=True)
        yield [(index, text) for index, text in documents if not unusable(text)]


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
    order: Sequence[int],
    student: PreTrainedTokenizerBase,
    length: int,
) -> Iterator[tuple[str, Spans]]:
    """Yield texts of so many student tokens, and the spans of these tokens.

    Whole documents, with a blank line between them, until there are enough tokens; the text ends
    with the last one.
    """
    parts: list[str] = []
    tokens, read = 0, partial(_read, student)
    found = (pair for batch in _batches(corpus, order) for pair in _encode([read], batch))
    for (_, text), (spans,) in found:
        parts.append(str(text))
        tokens += len(spans)
        if tokens < length:
            continue
        joined = "\n\n".join(parts)
        kept = read([joined])[0][:length]
        # Tokens may merge where documents meet; then there are too few, and one more is read.
        if len(kept) == length:
            yield joined[: kept[-1, 1]], kept
            parts, tokens = [], 0


def _chunks(
    teacher: PreTrainedTokenizerBase, sampled: Sequence[tuple[str, Spans]], counts: Sequence[int]
) -> list[JsonObject]:
    """Average IoU and IoS over sequences for each number of chunks, with standard errors."""
    pairs = [(ours, _read(teacher, [text])[0]) for text, ours in sampled]
    found: list[JsonObject] = []
    for chunks in counts if pairs else ():
        overlaps = [map(np.mean, chunk_overlaps(*pair, chunks)) for pair in pairs]
        means = pd.DataFrame(overlaps, columns=["iou", "ios"])
        # A single sequence has no standard error.
        errors = means.sem().dropna().add_suffix("_standard_error")
        found.append({"chunks": chunks, **means.mean(), **errors})
    return found


# -- Tables and figure -----------------------------------------------------------------------


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    vocabulary, mapping = [["shared tokens, of", *names]], [["student tokens", *names]]
    for kind, how in (("raw", "as written"), ("bytes", "as bytes")):
        for whose in ("teacher", "student", "union"):
            shares = [teacher["vocabulary_overlap"][kind][whose] for teacher in teachers]
            vocabulary.append([f"{whose}, {how}", *map(_percent, shares)])
    found = [teacher["mapping"] | teacher["token_level"] for teacher in teachers]
    for key in found[0]:
        # Ratios are no shares.
        write = "{:.4f}".format if "_per_" in key else _percent
        mapping.append([key.replace("_", " "), *(write(numbers[key]) for numbers in found)])
    tables = {
        "Vocabulary overlap (%)": vocabulary,
        "Token-level map (% of the student's tokens)": mapping,
    }
    if content["sequences"]:
        rows = [["chunks", *names]]
        for points in zip(*(teacher["chunks"] for teacher in teachers), strict=True):
            cells = [f"{_percent(x['iou'])} / {_percent(x['ios'])}" for x in points]
            rows.append([str(points[0]["chunks"]), *cells])
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        tables[f"Chunks of {sizes} student tokens, IoU / IoS (%)"] = rows
    for name, teacher in zip(names, teachers, strict=True):
        if teacher["worst"]:
            tables[f"Documents that fit {name} worst, numbered from 0"] = _worst(teacher)
    lines = [
        f"student: {content['student']}",
        *(f"teacher: {teacher['teacher']}" for teacher in teachers),
        f"corpus: {content['dataset']}, {content['documents']:,} documents"
        f" ({content['skipped']:,} left out)",
    ]
    for title, rows in tables.items():
        lines += ["", f"## {title}", "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def labels(content: JsonObject) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name or name for name in names]
    return short if len(set(short)) == len(short) else names


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _worst(teacher: JsonObject) -> list[list[str]]:
    rows = [["document", "IoU", "IoS", "mapped", "student tokens", "teacher tokens", "begins"]]
    for one in teacher["worst"]:
        shares = (_percent(one[key]) for key in ("iou", "ios", "mapped"))
        tokens = (str(one[key]) for key in ("student_tokens", "teacher_tokens"))
        beginning = json.dumps(one["beginning"], ensure_ascii=False)
        rows.append([str(one["document"]), *shares, *tokens, beginning])
    return rows


def draw_audit(content: JsonObject, path: Path) -> None:
    """Draw IoU and IoS against the number of chunks, and beside them the token level."""
    figure, places = new_plot(10.4, 4.2, columns=2)
    handles = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        ticks = [*map(str, content["settings"]["chunks"]), "token level"]
        axes.set_xticks(range(len(ticks)), ticks)
        for index, teacher in enumerate(content["teachers"]):
            look, points = series_style(index), teacher["chunks"]
            # Bars: 95 % intervals over sequences.
            handles[labels(content)[index]] = axes.errorbar(
                range(len(points)),
                [100 * point[key] for point in points],
                yerr=[196 * point.get(f"{key}_standard_error", 0.0) for point in points],
                linestyle=dashes(index),
                capsize=2.5,
                **look,
            )
            axes.plot(len(ticks) - 1, 100 * teacher["token_level"][key], linestyle="none", **look)
        axes.set(xlabel="chunks of a sequence", ylabel=f"{name} (% of characters)")
    add_legend(figure, handles)
    save_plot(figure, path)


def write_audit(content: JsonObject, directory: Path) -> None:
    """Write `audit.json`, `audit.md` and `audit.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "audit.json", content)
    write_text(directory / "audit.md", audit_markdown(content))
    draw_audit(content, directory / "audit.png")


# -- The command -----------------------------------------------------------------------------


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    parser.add_dataset(required=True)
    add("--student_chat_template", help="plain, chatml or a file; default: its tokenizer's.")
    add("--teacher_chat_template", nargs="+", help="Likewise: one for all, or one for each.")
    add("--documents", type=int, help="Only the first ones; default: all.")
    # Chunks of equal token count, Figure 3 of the paper.
    cut = "Student tokens of a sequence that is cut into chunks; default: 2048."
    add("--sequence_length", type=int, default=2048, help=cut)
    most = "How many, at most; default: 150."
    add("--sequences", type=int, default=150, help=most)
    chunks = "Numbers of chunks of a sequence; default: 2 4 8 ... 512."
    add("--chunks", type=int, nargs="+", default=CHUNKS, help=chunks)
    order = "Of the documents' order in sequences; default: 0."
    add("--seed", type=int, default=0, help=order)
    worst = "Documents to name per teacher; default: 10."
    add("--worst", type=int, default=10, help=worst)
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    return parser.parse_args(argv)


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers, and print what was found."""
    arguments = _parse(argv)
    from vocagnolm.corpus import load_corpus, load_sample

    # Before the work, which may take minutes.
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    if (most := max(arguments.chunks)) > arguments.sequence_length:
        raise ValueError(f"--chunks {most} exceeds --sequence_length: a chunk needs a token")
    trust = arguments.trust_remote_code
    tokenizer = load_tokenizer(arguments.student, "student", trust_remote_code=trust)
    student = Named(arguments.student, tokenizer, arguments.student_chat_template)
    names, option = arguments.teacher, "teacher_chat_template"
    templates = one_for_each(option, arguments.teacher_chat_template, len(names), "teachers")
    teachers = [
        Named(name, load_tokenizer(name, "teacher", trust_remote_code=trust), template)
        for name, template in zip(names, templates, strict=True)
    ]
    ((_, options),) = corpora_of(arguments)
    # A sample is read without downloading the rest.
    if arguments.documents is None:
        corpus = load_corpus(arguments.dataset, **options)
    else:
        corpus, _ = load_sample(arguments.dataset, arguments.documents, **options)
    names = ("sequence_length", "sequences", "chunks", "worst", "seed")
    sizes = {name: vars(arguments)[name] for name in names}
    found = audit(student, teachers, corpus, **sizes)
    content = {"dataset": arguments.dataset, **options, "settings": sizes, **found}
    if arguments.output_dir:
        write_audit(content, arguments.output_dir)
    say(audit_markdown(content).rstrip("\n"))
