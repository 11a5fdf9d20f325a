"""Measure how chunks of equal token count overlap, for figures 3 and 6 of the paper.

    vocagnolm audit --student S --teacher T --dataset D --output_dir audits/math
    python benchmarks/chunks.py --audit audits/math/audit.json --output audits/math/chunks.json

The output is the audit, with the overlap of chunks by their number. Texts of 2,048 student tokens,
made of whole documents in random order, are cut into chunks of equal token count for each
tokenizer.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from vocagnolm.collator import chunk_edges
from vocagnolm.conventions import UNMAPPED, Spans
from vocagnolm.corpus import load_sample
from vocagnolm.report.audit import Shares, hull, overlaps
from vocagnolm.shell.io import read_json, write_json
from vocagnolm.spans import encode
from vocagnolm.texts import read_texts
from vocagnolm.tokenizer import load_tokenizer

# As in Figure 3 of the paper.
CHUNKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


def chunk_overlaps(
    student_spans: Spans, teacher_spans: Spans, chunks: int
) -> tuple[Shares, Shares]:
    """Return IoU and IoS of the student's non-empty chunks with the teacher's."""
    student_chunks = _chunk_ranges(len(student_spans), chunks)
    teacher_chunks = _chunk_ranges(len(teacher_spans), chunks)
    # If a text has fewer tokens than chunks, some are empty. A student's empty chunk has no share,
    # and a teacher's overlaps nothing.
    teacher_chunks[teacher_chunks[:, 0] == teacher_chunks[:, 1]] = UNMAPPED
    filled = student_chunks[:, 0] < student_chunks[:, 1]
    student_hulls = hull(student_spans, student_chunks[filled])
    return overlaps(student_hulls, teacher_spans, teacher_chunks[filled])


def _chunk_ranges(tokens: int, chunks: int) -> Spans:
    """Return the half-open ranges of tokens [chunks, 2] of chunks of equal length."""
    edges = chunk_edges(tokens, chunks)
    return np.stack((edges[:-1], edges[1:]), axis=1)


def sequences(
    corpus: datasets.Dataset, student: PreTrainedTokenizerBase, length: int
) -> Iterator[tuple[str, Spans]]:
    """Join whole documents; yield texts of `length` student tokens, and the spans of these."""
    # Documents from one source often follow each other, so read them in random order.
    order = list(range(len(corpus)))
    random.Random(0).shuffle(order)
    parts: list[str] = []
    tokens = 0
    for _, text in read_texts(corpus.select(order), range(len(corpus))):
        parts.append(text)
        tokens += len(encode(student, text).spans)
        if tokens < length:
            continue
        joined = "\n\n".join(parts)
        spans = encode(student, joined).spans[:length]
        # Tokens may merge where documents meet. Then there are too few of them, and one more
        # document is read.
        if len(spans) == length:
            yield joined[: spans[-1, 1]], spans
            parts = []
            tokens = 0


def mean_overlaps(pairs: Sequence[tuple[Spans, Spans]], chunks: int) -> dict[str, Any]:
    """Average IoU and IoS over sequences, with standard errors; a single one has none."""
    rows = []
    for student_spans, teacher_spans in pairs:
        iou, ios = chunk_overlaps(student_spans, teacher_spans, chunks)
        rows.append({"iou": iou.mean(), "ios": ios.mean()})
    means = pd.DataFrame(rows)
    # The standard error of a single sequence is NaN.
    errors = means.sem().dropna().add_suffix("_standard_error")
    return {"chunks": chunks, **means.mean(), **errors}


def main(argv: Sequence[str] | None = None) -> None:
    """Add the overlap of chunks to an audit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audit", type=Path, required=True, help="audit.json")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sequence_length", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=150)
    parser.add_argument("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    content = read_json(arguments.audit)
    trust = arguments.trust_remote_code
    student = load_tokenizer(content["student"], "student", trust_remote_code=trust)
    options = {name: content[name] for name in ("split", "text_column", "config_name")}
    count = content["documents"] + content["skipped"]
    corpus, _ = load_sample(content["dataset"], count, **options)
    every = sequences(corpus, student, arguments.sequence_length)
    sampled = list(itertools.islice(every, arguments.sequences))
    for audited in content["teachers"]:
        teacher = load_tokenizer(audited["teacher"], "teacher", trust_remote_code=trust)
        # A sequence ends with a student token, and the teacher reads the same characters.
        pairs = [(spans, encode(teacher, text).spans) for text, spans in sampled]
        audited["chunks"] = [mean_overlaps(pairs, chunks) for chunks in CHUNKS]
    write_json(arguments.output, content)


if __name__ == "__main__":
    main()
