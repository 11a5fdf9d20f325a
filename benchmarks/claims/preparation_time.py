"""Compare the preparation of a corpus with the two tokenizations alone, which give ids.

Both tokenizers are called as one does without alignment, 256 texts at a time. Preparation also
finds spans, cuts long documents, counts what is mapped, and writes the rows to the disk. Beside
them: both tokenizers by `datasets.map`, which hashes them and writes ids; and blocks, ours with a
teacher and TRL's without, by `map` and its `pack_dataset`, where it is installed. Processor time of
one thread, in turns, on PlanetMath with the tokenizers of TinyLlama and Qwen2.5. What does not grow
with the texts, 0.4 s for these vocabularies, is in it.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import datasets

from benchmarks.generated import generate_texts, train_student, train_teacher
from benchmarks.harness import Claim, Measured, Skipped, Way, take_turns
from benchmarks.peers import SHARED
from vocagnolm.data import align_corpus
from vocagnolm.packing import Blocks
from vocagnolm.readers import Reader
from vocagnolm.texts.tokenizers import load_tokenizer

CLAIM = Claim("preparing a corpus takes at most 1.15 times both tokenizations alone", at_most=1.15)
BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Size:
    """Documents, turns, contexts; empty names are generated texts and trained tokenizers."""

    documents: int = 10_000
    turns: int = 5
    contexts: str = "2048 4096"
    corpus: str = str(SHARED / "data/corpora/planetmath.jsonl")
    student: str = str(SHARED / "tokenizers/tinyllama")
    teacher: str = str(SHARED / "tokenizers/qwen2.5")


FULL, SMALL, TINY = Size(), Size(turns=1), Size(20, 1, corpus="", student="", teacher="")


def measure(size: Size) -> Measured:
    """Return the ratio of processor times."""
    texts, readers = load(size)

    def tokenize(_: object) -> None:
        for reader in readers:
            for first in range(0, len(texts), BATCH_DOCUMENTS):
                batch = texts[first : first + BATCH_DOCUMENTS]
                reader.tokenizer(batch, add_special_tokens=False, verbose=False)

    def mapped(corpus: object, *chosen: Reader) -> datasets.Dataset:
        def ids(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
            encode = {"add_special_tokens": False, "verbose": False}
            read = [reader.tokenizer(batch["text"], **encode)["input_ids"] for reader in chosen]
            return dict(zip(("input_ids", "teacher_ids"), read, strict=False))

        assert isinstance(corpus, datasets.Dataset)
        return corpus.map(
            ids, batched=True, batch_size=BATCH_DOCUMENTS, remove_columns=corpus.column_names
        )

    def ours(corpus: object) -> Blocks:
        assert isinstance(corpus, datasets.Dataset)
        limits = [reader.limit for reader in readers]
        return Blocks(align_corpus(corpus, *readers).rows, *limits)

    def trl(corpus: object) -> object:
        from trl import pack_dataset

        return pack_dataset(mapped(corpus, readers[0]), readers[0].limit, "bfd_split")

    with tempfile.TemporaryDirectory() as name:
        # Each turn has a copy of its own, beside which nothing is cached.
        corpora = (write(texts, Path(name) / str(number)) for number in count())

        def fresh(_: int) -> datasets.Dataset:
            return next(corpora)

        ways = {
            "both tokenizations": Way(tokenize),
            "preparation": Way(lambda corpus: align_corpus(corpus, *readers), fresh),
            "both by datasets.map": Way(lambda corpus: mapped(corpus, *readers), fresh),
            "our blocks": Way(ours, fresh),
        }
        if importlib.util.find_spec("trl"):
            ways["TRL's blocks, student alone"] = Way(trl, fresh)
        take_turns(ways, size.turns, warm_up=1)
        tokens = align_corpus(next(corpora), *readers).total("student_tokens")
    both, prepared, *_ = ways.values()
    details = [f"{len(texts):,} documents, {tokens:,} student tokens"]
    details += [f"{label:28} {way.spread}" for label, way in ways.items()]
    details.append(f"{tokens / prepared.median_s:,.0f} student tokens per second")
    return Measured(prepared.median_s / both.median_s, tuple(details))


def load(size: Size) -> tuple[list[str], tuple[Reader, Reader]]:
    """Return the texts, and the readers of student and teacher.

    Raises:
        Skipped: a file is missing.
    """
    given = (size.corpus, size.student, size.teacher)
    if missing := [path for path in given if path and not Path(path).exists()]:
        raise Skipped(f"it needs {missing[0]}: --set corpus=FILE.jsonl student=DIR teacher=DIR")
    texts = generate_texts(size.documents)
    if size.corpus:
        with Path(size.corpus).open(encoding="utf-8") as lines:
            texts = [json.loads(line)["text"] for line in islice(lines, size.documents)]
    student = load_tokenizer(size.student, "student") if size.student else train_student(texts)
    teacher = load_tokenizer(size.teacher, "teacher") if size.teacher else train_teacher(texts)
    limits = [int(limit) for limit in size.contexts.split()]
    return texts, (Reader(student, 1, 2, limits[0]), Reader(teacher, 1, None, limits[1]))


def write(texts: list[str], directory: Path) -> datasets.Dataset:
    """A corpus on the disk, as files are read."""
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(directory)
    return datasets.load_from_disk(str(directory))
