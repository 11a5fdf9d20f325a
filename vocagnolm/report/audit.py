"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Tokens in common, the make-up of the token-level map on every document, and the overlap of chunks of
equal token count (Figure 3 of the paper). docs/audit.md explains every number. Exit status: 0 done,
2 a wrong argument or file.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.cli import Parser, corpora_of, print_main, shell
from vocagnolm.conventions import TEXT
from vocagnolm.io import JsonObject, check_writable, markdown_table, write_json, write_text
from vocagnolm.readers import load_tokenizer, tokenizer_sha256
from vocagnolm.report.overlap import (
    chunk_overlaps,
    count_map,
    decoded_vocabulary,
    map_shares,
    mean_overlaps,
    vocabulary_overlap,
)
from vocagnolm.report.plots import add_legend, dashes, new_plot, save_plot, series_style
from vocagnolm.spans import Spans, encode_batch

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

# Documents that are in memory at once.
_BATCH = 128
# Chunks of a sequence.
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def audit(
    student: PreTrainedTokenizerBase,
    teachers: Mapping[str, PreTrainedTokenizerBase],
    corpus: datasets.Dataset,
    *,
    sequence_length: int = 2048,
    sequences: int = 150,
    chunks: Sequence[int] = CHUNKS,
    seed: int = 0,
) -> JsonObject:
    """Measure how the tokens of a student and of each teacher lie on the documents of a corpus.

    Documents that are no text, or in which a tokenizer finds no token, are left out for all.
    Returns the content of `audit.json`; all shares are in [0, 1].
    """
    counts = {name: Counter[str]() for name in teachers}
    usable: list[int] = []
    for batch in _batches(corpus, tqdm(range(len(corpus)), desc="documents", disable=None)):
        texts = list(batch.values())
        read = [_read(tokenizer, texts) for tokenizer in (student, *teachers.values())]
        for index, text, ours, *theirs in zip(batch, texts, *read, strict=True):
            if not all(map(len, (ours, *theirs))):
                continue
            usable.append(index)
            for name, spans in zip(teachers, theirs, strict=True):
                counts[name].update(count_map(len(text), ours, spans, align_spans(ours, spans)))
    if not usable:
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, each of them empty, not text"
            " or without tokens; give another one, or another --text_column"
        )
    order = list(usable)
    random.Random(seed).shuffle(order)
    found_sequences = _sequences(corpus, order, student, sequence_length)
    sampled = list(itertools.islice(found_sequences, sequences))
    if not sampled:
        logging.getLogger(__name__).warning(
            "no sequence of %d student tokens in %d documents, so no chunks: lower %s",
            *(sequence_length, len(usable), "--sequence_length"),
        )
    found_teachers = []
    for name, teacher in teachers.items():
        raw = vocabulary_overlap(set(student.get_vocab()), set(teacher.get_vocab()))
        as_bytes = vocabulary_overlap(decoded_vocabulary(student), decoded_vocabulary(teacher))
        found_teachers.append(
            {
                "teacher": name,
                "teacher_sha256": tokenizer_sha256(teacher),
                "vocabulary_overlap": {"raw": raw, "bytes": as_bytes},
                "mapping": map_shares(counts[name]),
                "token_level": mean_overlaps(counts[name]),
                "chunks": _chunks(teacher, sampled, chunks),
                "counts": dict(counts[name]),
            }
        )
    return {
        "format": 1,
        "student_sha256": tokenizer_sha256(student),
        "documents": len(usable),
        "skipped": len(corpus) - len(usable),
        "sequences": len(sampled),
        "teachers": found_teachers,
    }


def _batches(corpus: datasets.Dataset, indices: Iterable[int]) -> Iterator[dict[int, str]]:
    """Read some documents, in the order given; yield those that are text by index."""
    # Here, because it brings datasets, which the command's --help does not need.
    from vocagnolm.corpus import column_values, unusable

    if getattr(corpus.features[TEXT], "dtype", None) == "string":
        # As Arrow: the library would fail on a whole batch if one text in it is not valid UTF-8.
        corpus = corpus.with_format("arrow")
    rest = iter(indices)
    while batch := list(itertools.islice(rest, _BATCH)):
        texts = zip(batch, column_values(corpus[batch][TEXT]), strict=True)
        yield {index: text for index, text in texts if not unusable(text)}


def _read(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Spans]:
    return [one.spans for one in encode_batch(tokenizer, texts)]


def _sequences(
    corpus: datasets.Dataset, order: Sequence[int], student: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, Spans]]:
    """Join whole documents; yield texts of so many student tokens, and the spans of these."""
    parts: list[str] = []
    tokens = 0
    for batch in _batches(corpus, order):
        texts = list(batch.values())
        for text, spans in zip(texts, _read(student, texts), strict=True):
            parts.append(text)
            tokens += len(spans)
            if tokens < length:
                continue
            joined = "\n\n".join(parts)
            kept = _read(student, [joined])[0][:length]
            # Tokens may merge where documents meet; then one more document is read.
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
        mapping.append([key.replace("_", " "), *(write(shares[key]) for shares in found)])
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
    skipped = f"{content['documents']:,} documents ({content['skipped']:,} left out)"
    lines = [f"student: {content['student']}"]
    lines += [f"teacher: {teacher['teacher']}" for teacher in teachers]
    lines.append(f"corpus: {content['dataset']}, {skipped}")
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
    add("--documents", type=int, help="Only the first ones; default: all.")
    # Chunks of equal token count, Figure 3 of the paper.
    cut = "Student tokens of a sequence that is cut into chunks; default: 2048."
    add("--sequence_length", type=int, default=2048, help=cut)
    add("--sequences", type=int, default=150, help="How many, at most; default: 150.")
    chunks = "Counts of chunks of a sequence; default: 2 4 8 ... 512."
    add("--chunks", type=int, nargs="+", default=CHUNKS, help=chunks)
    add("--seed", type=int, default=0, help="Of the documents' order in sequences; default: 0.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    return parser.parse_args(argv)


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers, and print what was found."""
    arguments = _parse(argv)
    from vocagnolm.corpus import is_conversations, load_corpus, load_sample

    # Before the work, which may take minutes.
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    if (most := max(arguments.chunks)) > arguments.sequence_length:
        raise ValueError(f"--chunks {most} exceeds --sequence_length: a chunk needs a token")
    trust = arguments.trust_remote_code
    student = load_tokenizer(arguments.student, "student", trust_remote_code=trust)
    teachers = {
        name: load_tokenizer(name, "teacher", trust_remote_code=trust) for name in arguments.teacher
    }
    ((_, options),) = corpora_of(arguments)
    # A sample is read without downloading the rest.
    if arguments.documents is None:
        corpus = load_corpus(arguments.dataset, **options)
    else:
        corpus, _ = load_sample(arguments.dataset, arguments.documents, **options)
    if is_conversations(corpus):
        raise ValueError("--dataset has conversations: audit documents, as with --text_column")
    names = ("sequence_length", "sequences", "chunks", "seed")
    sizes = {name: vars(arguments)[name] for name in names}
    content = {"student": arguments.student, "dataset": arguments.dataset, **options}
    content |= {"settings": sizes, **audit(student, teachers, corpus, **sizes)}
    if arguments.output_dir:
        write_audit(content, arguments.output_dir)
    print_main(audit_markdown(content).rstrip("\n"))
