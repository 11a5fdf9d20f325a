"""Audit the tokenizers of a student and of teachers, before any model is loaded.

    vocagnolm audit --student S --teacher T [T2 ...] --dataset D [--output_dir DIR]

Tokens in common, the make-up of the token-level map on every document, and the overlap of chunks of
equal token count (Figure 3 of the paper). docs/audit.md explains every number. Exit status: 0 done,
2 a wrong argument or file.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from tqdm.auto import tqdm

from vocagnolm.alignment import align_spans
from vocagnolm.cli import Parser, shell
from vocagnolm.conventions import UNMAPPED
from vocagnolm.fields import corpora_of
from vocagnolm.io import (
    JsonObject,
    check_writable,
    count_reasons,
    markdown_table,
    write_json,
    write_text,
)
from vocagnolm.printing import print_main
from vocagnolm.readers import load_tokenizer, tokenizer_sha256
from vocagnolm.report.plots import add_legend, dashes, new_plot, series_style
from vocagnolm.spans import Spans, byte_level, encode, encode_batch, sentencepiece

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

Shares = npt.NDArray[np.float64]
# Documents that are in memory at once.
_BATCH = 128
# Chunks of a sequence.
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)

# Shares of the student's tokens from which a verdict warns.
_MANY_UNMAPPED, _MANY_STRADDLING = 0.01, 0.1

# A text part A of the student and a part B of the teacher, as sets of characters, give
# IoU = |A n B| / |A u B| and IoS = |A n B| / |A| (Sections 2 and 6.1 of the paper).
#
# Spans are those of `spans.encode_batch`, without gaps and none empty: tokens that follow one
# another cover everything between the start of the first and the end of the last.


def vocabulary_overlap(student: Set[object], teacher: Set[object]) -> dict[str, float]:
    """Count the tokens in common, and their share of the teacher's, the student's and either's."""
    shared = len(student & teacher)
    return {
        "teacher": shared / len(teacher),
        "student": shared / len(student),
        "union": shared / len(student | teacher),
        "shared": shared,
        "teacher_size": len(teacher),
        "student_size": len(student),
    }


def decoded_vocabulary(tokenizer: PreTrainedTokenizerBase) -> set[bytes]:
    """Decode the tokens of a vocabulary to byte strings; added tokens are themselves."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps([backend["pre_tokenizer"], backend["decoder"]])
    spell = byte_level if is_byte_level else sentencepiece
    added = {token["content"] for token in backend["added_tokens"]}

    def decode(word: str) -> bytes:
        try:
            return word.encode() if word in added else spell(word)
        # A letter that stands for no byte.
        except KeyError:
            return word.encode()

    return {*map(decode, tokenizer.get_vocab())}


def overlaps(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> tuple[Shares, Shares]:
    """Return IoU and IoS [N] of every student token with the teacher tokens of its range.

    Spans are of one text, [N, 2] and [M, 2]; ranges [N, 2] are half-open, or (-1, -1): both are 0.

    >>> student = np.array([[0, 3], [3, 5]])  # "a+b", "=c"
    >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
    >>> iou, ios = overlaps(student, teacher, np.array([[0, 2], [1, 3]]))
    >>> iou.tolist(), ios.tolist()
    ([0.75, 0.5], [1.0, 1.0])
    """
    iou, ios = np.zeros((2, len(student_spans)))
    mapped = ranges[:, 0] != UNMAPPED
    ours, theirs = student_spans[mapped], _hull(teacher_spans, ranges[mapped])
    starts, ends = np.maximum(ours[:, 0], theirs[:, 0]), np.minimum(ours[:, 1], theirs[:, 1])
    shared = np.maximum(ends - starts, 0)
    lengths = ours[:, 1] - ours[:, 0]
    iou[mapped] = shared / (lengths + theirs[:, 1] - theirs[:, 0] - shared)
    ios[mapped] = shared / lengths
    return iou, ios


def chunk_overlaps(
    student_spans: Spans, teacher_spans: Spans, chunks: int
) -> tuple[Shares, Shares]:
    """Return IoU and IoS of the student's chunks that have tokens with the teacher's."""
    # Here, because it brings torch, which the command's --help does not need.
    from vocagnolm.packing import chunk_edges

    both = (chunk_edges(len(spans), chunks) for spans in (student_spans, teacher_spans))
    student, teacher = (np.stack((edges[:-1], edges[1:]), axis=1) for edges in both)
    teacher[teacher[:, 0] == teacher[:, 1]] = UNMAPPED
    # Fewer tokens than chunks leave chunks empty.
    filled = student[:, 0] < student[:, 1]
    return overlaps(_hull(student_spans, student[filled]), teacher_spans, teacher[filled])


def _hull(spans: Spans, ranges: Spans) -> Spans:
    """Return the characters from the first token of each range to its last."""
    return np.stack((spans[ranges[:, 0], 0], spans[ranges[:, 1] - 1, 1]), axis=1)


def count_map(
    characters: int, student_spans: Spans, teacher_spans: Spans, ranges: Spans
) -> dict[str, float]:
    """Count the kinds of student tokens in one text; spans and ranges as in `overlaps`.

    All are sums over tokens or characters, so counts of texts can be added.
    """
    iou, ios = overlaps(student_spans, teacher_spans, ranges)
    is_mapped = ranges[:, 0] != UNMAPPED
    sizes = ranges[:, 1] - ranges[:, 0]  # 0 where unmapped
    mapped = ranges[is_mapped]
    # Student less teacher, [start, end].
    before = student_spans[is_mapped] - _hull(teacher_spans, mapped)
    same_span = (sizes[is_mapped] == 1) & ~before.any(axis=1)
    straddling = (before[:, 0] > 0) | (before[:, 1] < 0)
    return {
        "characters": characters,
        "student_tokens": len(student_spans),
        "teacher_tokens": len(teacher_spans),
        # By the number of teacher tokens in their range.
        "unmapped": len(ranges) - len(mapped),
        "one": int((sizes == 1).sum()),
        "two": int((sizes == 2).sum()),
        "more": int((sizes > 2).sum()),
        # One teacher token of the same characters (one-to-one).
        "same_span": int(same_span.sum()),
        # The first teacher token is also one of the token before (many-to-one).
        "shared": int((mapped[1:, 0] < mapped[:-1, 1]).sum()),
        # The range begins before the token or ends after it.
        "straddling": int(straddling.sum()),
        "iou_sum": float(iou.sum()),
        "ios_sum": float(ios.sum()),
    }


def map_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return ratios of tokens and characters, and the share of each kind, which overlap."""
    tokens, characters = counts["student_tokens"], counts["characters"]
    return {
        "teacher_tokens_per_student_token": counts["teacher_tokens"] / tokens,
        "student_tokens_per_character": tokens / characters,
        "teacher_tokens_per_character": counts["teacher_tokens"] / characters,
        "mapped": 1 - counts["unmapped"] / tokens,
        "unmapped": counts["unmapped"] / tokens,
        "range_of_1": counts["one"] / tokens,
        "range_of_2": counts["two"] / tokens,
        "range_of_3_or_more": counts["more"] / tokens,
        "one_to_one": counts["same_span"] / tokens,
        "one_to_many": (counts["two"] + counts["more"]) / tokens,
        "many_to_one": counts["shared"] / tokens,
        "straddling": counts["straddling"] / tokens,
    }


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
    found_documents = _documents(corpus, (student, *teachers.values()))
    bar = tqdm(found_documents, desc="usable documents", disable=None)
    for index, text, (ours, *theirs) in bar:
        if not all(map(len, (ours, *theirs))):
            continue
        usable.append(index)
        for name, spans in zip(teachers, theirs, strict=True):
            counts[name].update(count_map(len(text), ours, spans, align_spans(ours, spans)))
    if not usable:
        from vocagnolm.corpus import reasons_in

        reasons = count_reasons(reasons_in(corpus)) or "without tokens"
        raise ValueError(
            f"--dataset has no usable document: {len(corpus):,} read, all of them skipped "
            f"({reasons}); give another one, or another --text_column"
        )
    documents = len(usable)
    random.Random(seed).shuffle(usable)
    found_sequences = _sequences(corpus.select(usable), student, sequence_length)
    sampled = list(itertools.islice(found_sequences, sequences))
    if not sampled:
        logging.getLogger(__name__).warning(
            f"no sequence of {sequence_length} student tokens in {documents} documents, so no "
            "chunks: lower --sequence_length"
        )
    found_teachers = []
    for name, teacher in teachers.items():
        found, tokens = counts[name], counts[name]["student_tokens"]
        raw = vocabulary_overlap(set(student.get_vocab()), set(teacher.get_vocab()))
        as_bytes = vocabulary_overlap(decoded_vocabulary(student), decoded_vocabulary(teacher))
        pairs = [(ours, encode(teacher, text).spans) for text, ours in sampled]
        found_teachers.append(
            {
                "teacher": name,
                "teacher_sha256": tokenizer_sha256(teacher),
                "vocabulary_overlap": {"raw": raw, "bytes": as_bytes},
                "mapping": map_shares(found),
                "token_level": {"iou": found["iou_sum"] / tokens, "ios": found["ios_sum"] / tokens},
                "chunks": [_mean_overlaps(pairs, n) for n in chunks] if pairs else [],
                "counts": dict(found),
            }
        )
    return {
        "format": 1,
        "student_sha256": tokenizer_sha256(student),
        "documents": documents,
        "skipped": len(corpus) - documents,
        "sequences": len(sampled),
        "teachers": found_teachers,
    }


def _documents(
    corpus: datasets.Dataset, tokenizers: Sequence[PreTrainedTokenizerBase]
) -> Iterator[tuple[int, str, list[Spans]]]:
    """Yield the documents that are text by index, with the spans of each tokenizer."""
    # Here, because it brings datasets, which the command's --help does not need.
    from vocagnolm.corpus import read_texts

    found = read_texts(corpus, range(len(corpus)))
    while batch := list(itertools.islice(found, _BATCH)):
        read = [encode_batch(tokenizer, [text for _, text in batch]) for tokenizer in tokenizers]
        for (index, text), *encodings in zip(batch, *read, strict=True):
            yield index, text, [encoding.spans for encoding in encodings]


def _sequences(
    corpus: datasets.Dataset, student: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, Spans]]:
    """Join whole documents; yield texts of so many student tokens, and the spans of these."""
    parts: list[str] = []
    tokens = 0
    for _, text, (spans,) in _documents(corpus, [student]):
        parts.append(text)
        tokens += len(spans)
        if tokens < length:
            continue
        joined = "\n\n".join(parts)
        kept = encode(student, joined).spans[:length]
        # Tokens may merge where documents meet; then one more document is read.
        if len(kept) == length:
            yield joined[: kept[-1, 1]], kept
            parts, tokens = [], 0


def _mean_overlaps(pairs: Sequence[tuple[Spans, Spans]], chunks: int) -> JsonObject:
    """Average IoU and IoS over sequences, with standard errors; a single one has none."""
    overlaps = [map(np.mean, chunk_overlaps(*pair, chunks)) for pair in pairs]
    means = pd.DataFrame(overlaps, columns=["iou", "ios"])
    errors = means.sem().dropna().add_suffix("_standard_error")
    return {"chunks": chunks, **means.mean(), **errors}


def audit_markdown(content: JsonObject) -> str:
    """Lay out an audit as tables: a column per teacher, in percent."""
    teachers, names = content["teachers"], labels(content)
    read = f"{content['documents']:,} documents ({content['skipped']:,} left out)"
    lines = [f"- {name}: {verdict(x['mapping'])}" for name, x in zip(names, teachers, strict=True)]
    lines.append("- No model was loaded: vocagnolm inspect shows what a teacher knows of a text")
    lines += ["", f"student: {content['student']}"]
    lines += [f"teacher: {teacher['teacher']}" for teacher in teachers]
    lines.append(f"corpus: {content['dataset']}, {read}")
    if content.get("files"):
        lines.append(f"files: {content['files']}")
    if content.get("skip_reasons"):
        lines.append(f"skipped: {content['skip_reasons']}")
    rows = [["shared tokens, of", *names]]
    for kind, how in (("raw", "as written"), ("bytes", "as bytes")):
        for whose in ("teacher", "student", "union"):
            shares = [teacher["vocabulary_overlap"][kind][whose] for teacher in teachers]
            rows.append([f"{whose}, {how}", *map(_percent, shares)])
    lines += ["", "## Vocabulary overlap (%)", "", markdown_table(rows)]
    rows = [["student tokens", *names]]
    found = [teacher["mapping"] | teacher["token_level"] for teacher in teachers]
    for key in found[0]:
        # Ratios are no shares.
        write = "{:.4f}".format if "_per_" in key else _percent
        rows.append([key.replace("_", " "), *(write(shares[key]) for shares in found)])
    lines += ["", "## Token-level map (% of the student's tokens)", "", markdown_table(rows)]
    if content["sequences"]:
        rows = [["chunks", *names]]
        for points in zip(*(teacher["chunks"] for teacher in teachers), strict=True):
            cells = [f"{_percent(x['iou'])} / {_percent(x['ios'])}" for x in points]
            rows.append([str(points[0]["chunks"]), *cells])
        sizes = f"{content['sequences']} x {content['settings']['sequence_length']:,}"
        title = f"## Chunks of {sizes} student tokens, IoU / IoS (%)"
        lines += ["", title, "", markdown_table(rows)]
    return "\n".join(lines) + "\n"


def verdict(mapping: Mapping[str, float]) -> str:
    """Say what the `map_shares` of a pair mean for a run."""
    unmapped, straddling = mapping["unmapped"], mapping["straddling"]
    shares = f"{mapping['mapped']:.2%} of the student's tokens have teacher tokens, "
    shares += f"{mapping['one_to_one']:.0%} exactly one with the same characters"
    if unmapped > _MANY_UNMAPPED:
        return f"a poor pair: {shares}; {unmapped:.1%} have none and are always trained"
    if straddling > _MANY_STRADDLING:
        shares += f"; {straddling:.0%} share a teacher token with text beside them: consider"
        shares += " --aggregation share"
    return f"a good pair: {shares}"


def labels(content: JsonObject) -> list[str]:
    """Shorten the names of the teachers to their last parts, unless two have the same."""
    names = [teacher["teacher"] for teacher in content["teachers"]]
    short = [PurePosixPath(name).name for name in names]
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
    figure.savefig(path)


def _read_corpus(arguments: Namespace) -> tuple[Any, JsonObject]:
    """Read the documents to audit, and say which files and documents are left out."""
    from vocagnolm import corpus as documents

    ((name, options),) = corpora_of(arguments)
    if arguments.documents is None:
        corpus = documents.load_corpus(name, **options)
    else:
        # Without downloading the rest.
        corpus, _ = documents.load_sample(name, arguments.documents, **options)
    if documents.is_conversations(corpus):
        raise ValueError("--dataset has conversations: audit documents, as with --text_column")
    files = documents.files_of(name, split=options["split"], config_name=options["config_name"])
    reasons = count_reasons(documents.reasons_in(corpus))
    about = {"files": files.describe() if files else "", "skip_reasons": reasons}
    return corpus, {"dataset": name, **options, **about}


@shell("vocagnolm audit")
def main(argv: Sequence[str] | None = None) -> None:
    """Audit the tokenizers, and print what was found."""
    parser = Parser("vocagnolm audit", __doc__)
    add = parser.add_argument
    cut = "Student tokens of a sequence that is cut into chunks; default: 2048."
    add("--student", required=True, help="Its tokenizer: a directory or a hub name.")
    add("--teacher", required=True, nargs="+", help="Their tokenizers, likewise.")
    parser.add_dataset(required=True)
    add("--documents", type=int, help="Only the first ones; default: all.")
    add("--sequence_length", type=int, default=2048, help=cut)
    add("--sequences", type=int, default=150, help="How many, at most; default: 150.")
    add("--chunks", type=int, nargs="+", default=CHUNKS, help="Default: 2 4 8 ... 512.")
    add("--seed", type=int, default=0, help="Of the documents' order in sequences; default: 0.")
    add("--output_dir", type=Path, help="Gets audit.json, audit.md and audit.png.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    if arguments.documents == 0:
        raise ValueError("--documents needs at least 1, got 0: leave it out for all")
    # Before the work, which may take minutes.
    if out := arguments.output_dir:
        check_writable(out)
    if (most := max(arguments.chunks)) > arguments.sequence_length:
        raise ValueError(f"--chunks {most} exceeds --sequence_length: a chunk needs a token")
    load = partial(load_tokenizer, trust_remote_code=arguments.trust_remote_code)
    student = load(arguments.student, "student")
    teachers = {name: load(name, "teacher") for name in arguments.teacher}
    corpus, content = _read_corpus(arguments)
    sizes = {x: vars(arguments)[x] for x in ("sequence_length", "sequences", "chunks", "seed")}
    content |= {"student": arguments.student, "settings": sizes}
    content |= audit(student, teachers, corpus, **sizes)
    text = audit_markdown(content)
    if out:
        write_text(out / "audit.md", text)
        write_json(out / "audit.json", content)
        draw_audit(content, out / "audit.png")
    print_main(text.rstrip("\n"))
