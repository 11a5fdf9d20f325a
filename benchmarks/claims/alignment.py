"""Compare the cost of alignment with that of tokenization.

Processor time of one thread, over documents of about 1,000 characters, a hundred at a time. The
filling of gaps and the shares of `--aggregation share` are shown beside the alignment. What a call
costs weighs on short documents: of 500 characters (GSM8K, MATH) alignment and gaps together pass
5 %. `--set corpus=FILE.jsonl student=DIR teacher=DIR` measures other texts, with other tokenizers
than those trained on the texts.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.harness import Claim, Measured, alone
from vocagnolm import spans
from vocagnolm.alignment import align_spans, covered_shares
from vocagnolm.texts.tokenizers import load_tokenizer

CLAIM = Claim("alignment alone takes at most 5 % of the time of tokenizing", at_most=0.05, unit="%")
BATCH_DOCUMENTS = 100


@dataclass(frozen=True)
class Size:
    """Texts and tokenizers; empty names stand for generated and trained ones."""

    documents: int = 2000
    corpus: str = ""
    student: str = ""
    teacher: str = ""


FULL, TINY = Size(), Size(documents=20)


def measure(size: Size) -> Measured:
    """Return the share of the tokenizers' time that alignment takes, in a process of its own."""
    return alone(compare, size)


def compare(size: Size) -> Measured:
    """Measure in this process."""
    texts = generate_texts(size.documents)
    if size.corpus:
        with Path(size.corpus).open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in islice(lines, size.documents)]
    student, teacher = (
        load_tokenizer(name, role) if name else train(texts)
        for name, role, train in (
            (size.student, "student", train_student),
            (size.teacher, "teacher", train_teacher),
        )
    )
    steps(student, teacher, texts[:BATCH_DOCUMENTS])  # warm up
    seconds, tokens = steps(student, teacher, texts)
    total = seconds["tokenize"]
    details = [f"{len(texts)} documents, {sum(map(len, texts)):,} characters, {tokens:,} tokens"]
    details += [
        f"{step:10} {value:8.3f} s {value / total:8.2%} of tokenization"
        for step, value in seconds.items()
    ]
    return Measured(seconds["align"] / total, tuple(details))


def steps(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, texts: list[str]
) -> tuple[dict[str, float], int]:
    """Return the processor seconds of every step over the whole corpus, and the student tokens."""
    seconds, tokens = {"tokenize": 0.0, "fill_gaps": 0.0, "align": 0.0, "shares": 0.0}, 0
    for first in range(0, len(texts), BATCH_DOCUMENTS):
        batch = texts[first : first + BATCH_DOCUMENTS]
        start = time.process_time()
        raw = [_offsets(tokenizer, batch) for tokenizer in (student, teacher)]
        tokenized = time.process_time()
        filled = [
            [spans.fill_gaps(span, text) for span, text in zip(side, batch, strict=True)]
            for side in raw
        ]
        complete = time.process_time()
        ranges = [align_spans(ours, theirs) for ours, theirs in zip(*filled, strict=True)]
        aligned = time.process_time()
        for ours, theirs, found in zip(*filled, ranges, strict=True):
            covered_shares(ours, theirs, found)
        seconds["shares"] += time.process_time() - aligned
        seconds["align"] += aligned - complete
        seconds["fill_gaps"] += complete - tokenized
        seconds["tokenize"] += tokenized - start
        tokens += sum(map(len, filled[0]))
    return seconds, tokens


def _offsets(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[np.ndarray]:
    output = tokenizer(
        texts,
        add_special_tokens=False,
        split_special_tokens=True,
        return_offsets_mapping=True,
        verbose=False,
    )
    return [
        np.fromiter(chain.from_iterable(pairs), np.int64, 2 * len(pairs)).reshape(-1, 2)
        for pairs in output["offset_mapping"]
    ]
