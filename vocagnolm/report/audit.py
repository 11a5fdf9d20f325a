"""Measure how well teachers' tokens align with a student's. Loads no model.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

An audit has the shared tokens, the number of teacher tokens that cover each student token, and the
overlap of chunks of equal token count (Figure 3 of the paper). docs/audit.md explains every number.
Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.cli import Parser, shell
from vocagnolm.conventions import Spans
from vocagnolm.fields import OptionError, corpora_of, in_range, listed
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.report.mapping import (
    chunk_overlaps,
    count_map,
    decoded_vocabulary,
    map_shares,
)
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import (
    JsonObject,
    count_reasons,
    markdown_table,
    print_main,
    write_json,
    write_text,
)
from vocagnolm.spans import encode, encode_batch
from vocagnolm.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_RECORD = "audit.json"
# How many documents are in memory at once.
_BATCH = 128
# The default numbers of chunks per sequence, as in Figure 3 of the paper.
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
# A verdict warns if a larger share of the student's tokens is unmapped, or straddles.
_MANY_UNMAPPED = 0.01
_MANY_STRADDLING = 0.1


# -- Measuring -----------------------------------------------------------------------------------


def audit(
    student: PreTrainedTokenizerBase,
    teachers: Mapping[str, PreTrainedTokenizerBase],
    corpus: datasets.Dataset,
    *,
    sequence_length: int = 2048,
    sequences: int = 150,
    chunks: Sequence[int] = CHUNKS,
) -> JsonObject:
    """Measure how a student's tokens overlap each teacher's on the documents of a corpus.

    Documents that are not text, or in which a tokenizer finds no token, are skipped for all.
    Returns what `audit.json` has of the pairs. All shares are in [0, 1].
    """
    counts = {name: Counter[str]() for name in teachers}
    usable: list[int] = []
    documents = _documents(corpus, [student, *teachers.values()])
    for index, _, spans_by_tokenizer in tqdm(documents, desc="usable documents", disable=None):
        # Measure all teachers on the same documents.
        if not all(len(spans) for spans in spans_by_tokenizer):
            continue
        usable.append(index)
        student_spans = spans_by_tokenizer[0]
        for name, teacher_spans in zip(teachers, spans_by_tokenizer[1:], strict=True):
            ranges = align_spans(student_spans, teacher_spans)
            counts[name].update(count_map(student_spans, teacher_spans, ranges))
    if not usable:
        from vocagnolm.texts import reasons_in

        reasons = count_reasons(reasons_in(corpus)) or "without tokens"
        raise OptionError(
            "dataset",
            f"has no usable document: {len(corpus):,} read, all of them skipped "
            f"({reasons}); give another one, or another --text_column",
        )
    # Documents from one source often follow each other, so draw sequences from the whole corpus.
    random.Random(0).shuffle(usable)
    all_sequences = _sequences(corpus.select(usable), student, sequence_length)
    sampled = list(itertools.islice(all_sequences, sequences))
    audited = []
    for name, teacher in teachers.items():
        audited.append(
            {"teacher": name} | _audit_pair(student, teacher, counts[name], sampled, chunks)
        )
    return {
        "documents": len(usable),
        "skipped": len(corpus) - len(usable),
        "sequences": len(sampled),
        "teachers": audited,
    }


def _audit_pair(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    counts: Mapping[str, float],
    sampled: Sequence[tuple[str, Spans]],
    chunks: Sequence[int],
) -> JsonObject:
    """Return what `audit.json` has of a teacher."""
    tokens = counts["student_tokens"]
    raw, as_bytes = set(teacher.get_vocab()), decoded_vocabulary(teacher)
    shared_raw = raw.intersection(student.get_vocab())
    shared_bytes = as_bytes & decoded_vocabulary(student)
    # A sequence ends with a student token, and the teacher reads the same characters.
    pairs = [(spans, encode(teacher, text).spans) for text, spans in sampled]
    return {
        "vocabulary_overlap": {
            "raw": {"teacher": len(shared_raw) / len(raw)},
            "bytes": {"teacher": len(shared_bytes) / len(as_bytes)},
        },
        "mapping": map_shares(counts),
        "token_level": {"iou": counts["iou_sum"] / tokens, "ios": counts["ios_sum"] / tokens},
        "chunks": [_mean_overlaps(pairs, n) for n in chunks] if pairs else [],
        "counts": dict(counts),
    }


def _documents(
    corpus: datasets.Dataset, tokenizers: Sequence[PreTrainedTokenizerBase]
) -> Iterator[tuple[int, str, list[Spans]]]:
    """Yield the documents that are text by index, with the spans of each tokenizer."""
    # This imports datasets, which --help does not need.
    from vocagnolm.texts import read_texts

    indexed_texts = read_texts(corpus, range(len(corpus)))
    while batch := list(itertools.islice(indexed_texts, _BATCH)):
        texts = [text for _, text in batch]
        encodings = [encode_batch(tokenizer, texts) for tokenizer in tokenizers]
        for place, (index, text) in enumerate(batch):
            yield index, text, [encoded[place].spans for encoded in encodings]


def _sequences(
    corpus: datasets.Dataset, student: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, Spans]]:
    """Join whole documents; yield texts of `length` student tokens, and the spans of these."""
    parts: list[str] = []
    tokens = 0
    for _, text, (spans,) in _documents(corpus, [student]):
        parts.append(text)
        tokens += len(spans)
        if tokens < length:
            continue
        joined = "\n\n".join(parts)
        spans_of_sequence = encode(student, joined).spans[:length]
        # Tokens may merge where documents meet. Then there are too few of them, and one more
        # document is read.
        if len(spans_of_sequence) == length:
            end = spans_of_sequence[-1, 1]
            yield joined[:end], spans_of_sequence
            parts = []
            tokens = 0


def _mean_overlaps(pairs: Sequence[tuple[Spans, Spans]], chunks: int) -> JsonObject:
    """Average IoU and IoS over sequences, with standard errors; a single one has none."""
    rows = []
    for student_spans, teacher_spans in pairs:
        iou, ios = chunk_overlaps(student_spans, teacher_spans, chunks)
        rows.append({"iou": iou.mean(), "ios": ios.mean()})
    means = pd.DataFrame(rows)
    # The standard error of a single sequence is NaN.
    errors = means.sem().dropna().add_suffix("_standard_error")
    point: JsonObject = {"chunks": chunks}
    point |= means.mean().to_dict()
    point |= errors.to_dict()
    return point


# -- Showing -------------------------------------------------------------------------------------


def audit_markdown(content: JsonObject) -> str:
    """Write an audit as a verdict on each pair, and tables with a column per teacher."""
    teachers = content["teachers"]
    names = [public_name(teacher["teacher"]) for teacher in teachers]
    # The verdicts come first, because many readers need nothing else.
    lines = []
    for name, teacher in zip(names, teachers, strict=True):
        lines.append(f"- {name}: {verdict(teacher['mapping'])}")
    lines.append("- No model was loaded: vocagnolm inspect shows what a teacher knows of a text")
    lines += ["", f"student: {content['student']}"]
    lines += [f"teacher: {teacher['teacher']}" for teacher in teachers]
    documents = f"{content['documents']:,} documents ({content['skipped']:,} skipped)"
    lines.append(f"corpus: {content['dataset']}, {documents}")
    for key in ("files", "skip_reasons"):
        if content[key]:
            lines.append(f"{key.replace('_', ' ')}: {content[key]}")
    vocabulary = [["shared tokens", *names]]
    for spelling, title in (("raw", "as written"), ("bytes", "as bytes")):
        overlaps = [teacher["vocabulary_overlap"][spelling]["teacher"] for teacher in teachers]
        vocabulary.append([title, *map(_percent, overlaps)])
    lines += ["", "## Vocabulary overlap (% of the teacher's)", "", markdown_table(vocabulary)]
    # All teachers have the same keys, which become the rows of the table.
    mapping = [["student tokens", *names]]
    columns = [teacher["mapping"] | teacher["token_level"] for teacher in teachers]
    for key in columns[0]:
        # A ratio of tokens to tokens is not a share.
        form = "{:.4f}".format if "_per_" in key else _percent
        mapping.append([key.replace("_", " "), *[form(shares[key]) for shares in columns]])
    title = "## Token-level map (% of the student's tokens)"
    lines += ["", title, "", markdown_table(mapping)]
    if content["sequences"]:
        chunks = [["chunks", *names]]
        for points in zip(*[teacher["chunks"] for teacher in teachers], strict=True):
            cells = [f"{_percent(point['iou'])} / {_percent(point['ios'])}" for point in points]
            chunks.append([str(points[0]["chunks"]), *cells])
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        title = f"## Chunks of {sizes} student tokens, IoU / IoS (%)"
        lines += ["", title, "", markdown_table(chunks)]
    return "\n".join(lines) + "\n"


def verdict(mapping: Mapping[str, float]) -> str:
    """Say what the `map_shares` of a pair mean for a run."""
    unmapped, straddling = mapping["unmapped"], mapping["straddling"]
    shares = f"{mapping['mapped']:.2%} of the student's tokens have teacher tokens, "
    shares += f"{mapping['one_to_one']:.0%} exactly one with the same characters"
    # Judge unmapped tokens first, because no option gives them a teacher.
    if unmapped > _MANY_UNMAPPED:
        return f"a poor pair: {shares}; {unmapped:.1%} have none and are always trained"
    if straddling > _MANY_STRADDLING:
        shares += f"; {straddling:.0%} share a teacher token with neighbouring text: consider"
        shares += " --aggregation share"
    return f"a good pair: {shares}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


# -- The command ---------------------------------------------------------------------------------


def _read_corpus(arguments: Namespace) -> tuple[Any, JsonObject]:
    """Read the documents to audit, and say which files and documents are skipped."""
    # This imports datasets, which --help does not need.
    from vocagnolm.corpus import load_corpus, load_sample
    from vocagnolm.texts import is_conversations, reasons_in

    ((name, options),) = corpora_of(arguments)
    if arguments.documents is None:
        corpus = load_corpus(name, **options)
    else:
        # A sample of a hub dataset does not download the rest of it.
        corpus, _ = load_sample(name, arguments.documents, **options)
    if is_conversations(corpus):
        raise OptionError(
            "dataset", "has conversations: audit documents, for example by --text_column"
        )
    content = {"dataset": name} | options
    content["files"] = corpus.info.description
    content["skip_reasons"] = count_reasons(reasons_in(corpus))
    return corpus, content


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers and print the result."""
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    cut = "Student tokens per sequence that is cut into chunks; default: 2048."
    add("--student", required=True, hub="model", help="Tokenizer: a hub name or a directory.")
    add("--teacher", required=True, nargs="+", hub="model", help="The teachers' tokenizers.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Read only the first N; default: all.")
    add("--sequence_length", type=int, default=2048, help=cut)
    add("--chunks", type=int, nargs="+", help="Chunks per sequence; default: 2 4 8 ... up to 512.")
    add("--output_dir", type=Path, help="For audit.json and audit.md.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    length = arguments.sequence_length
    in_range(arguments, "[1, inf)", "sequence_length", "documents")
    # A chunk needs a token.
    in_range(arguments, f"[1, {length}]", "chunks")
    if arguments.chunks is None:
        arguments.chunks = [count for count in CHUNKS if count <= length] or [1]
    out = arguments.output_dir
    # Check the directory before the work, which may take minutes.
    if out:
        check_output_directory(out, _RECORD, listed(arguments.dataset))
    # Tokenizers load in a second, so a wrong name shows before the corpus is read.
    load = partial(load_tokenizer, trust_remote_code=arguments.trust_remote_code)
    student = load(arguments.student, "student")
    teachers = {name: load(name, "teacher") for name in arguments.teacher}
    corpus, content = _read_corpus(arguments)
    sizes = {"sequence_length": length, "chunks": arguments.chunks}
    content |= {"student": arguments.student, "settings": sizes}
    content |= audit(student, teachers, corpus, **sizes)
    text = audit_markdown(content)
    if out:
        with output_directory(out, _RECORD):
            write_json(out / _RECORD, content)
            write_text(out / "audit.md", text)
    print_main(text.rstrip("\n"))
