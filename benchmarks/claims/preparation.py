"""Compare the time to prepare a corpus with both tokenizations alone; count bytes per token.

The tokenizations alone read 256 texts at a time, as one would without alignment. Preparation also
finds spans, cuts long documents, counts mapped tokens, and writes the rows to disk. The ways take
turns. Time is processor time of one thread.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import datasets

from benchmarks.generated import read_texts, tokenizer
from benchmarks.harness import Claim, Measured, Way, take_turns
from vocagnolm.data import Segments, align_corpus
from vocagnolm.readers import student_reader, teacher_reader

CLAIMS = (
    Claim("time", "preparing a corpus takes 1.15 times both tokenizations alone", at_most=1.15),
    Claim("bytes", "prepared data take 8 bytes a student token", at_most=8, unit="bytes"),
)
_BATCH = 256


@dataclass(frozen=True)
class Size:
    """Documents, contexts of student and teacher, and tokenizers (directories or kinds)."""

    documents: int = 3000
    turns: int = 2
    contexts: str = "2048 4096"
    corpus: str = ""
    student: str = "llama"
    teacher: str = "qwen"


FULL, TINY = Size(), Size(20, 1, student="tiny-llama", teacher="tiny-qwen")


def measure(size: Size) -> Measured:
    """Return the ratio of processor times, and the bytes of all columns per student token."""
    datasets.disable_progress_bars()
    texts = read_texts(size.corpus, size.documents)
    contexts = [int(context) for context in size.contexts.split()]
    tokenizers = [tokenizer(size.student), tokenizer(size.teacher)]
    readers = student_reader(tokenizers[0], contexts[0]), teacher_reader(tokenizers[1], contexts[1])

    def tokenize(_: object) -> None:
        for each in tokenizers:
            for first in range(0, len(texts), _BATCH):
                each(texts[first : first + _BATCH], add_special_tokens=False, verbose=False)

    def prepare(corpus: datasets.Dataset) -> Segments:
        return align_corpus(corpus, *readers)

    with tempfile.TemporaryDirectory() as name:
        numbers = count()

        def fresh(_: int) -> datasets.Dataset:
            """Write a new copy of the corpus, so that no cache file is next to it."""
            path = Path(name) / str(next(numbers))
            datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)
            return datasets.load_from_disk(str(path))

        ways = {
            "both tokenizations": Way(tokenize),
            "preparation": Way(prepare, fresh),
        }
        take_turns(ways, size.turns, warm_up=1)
        segments = prepare(fresh(0))
        stored, tokens = segments.rows.data.nbytes, segments.total("student_tokens")
    seconds = {label: way.median_s for label, way in ways.items()}
    details = [f"{len(texts):,} documents, {tokens:,} student tokens"]
    details += [f"{label:22}{way.spread}" for label, way in ways.items()]
    values = {
        "time": seconds["preparation"] / seconds["both tokenizations"],
        "bytes": stored / tokens,
    }
    return Measured(values, details)
