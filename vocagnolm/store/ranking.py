"""Scores how much a document has to teach, from both models' stored losses, and writes the files.

The two stores are of one corpus and any two tokenizers, and are matched by characters. Numbers of
documents go to the disk as they are made. Only the one to sort by is in memory, with its index: 16
bytes a document.
"""

import json
import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import IO, BinaryIO

import datasets
import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from vocagnolm.alignment import aggregate_losses, align_spans, covered_shares
from vocagnolm.conventions import TEXT, UNMAPPED, IntArray, Spans
from vocagnolm.shell.io import write_file
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.texts import read_texts

# The scores, and whether a larger one is better.
SCORES = {"excess": True, "ahead": True, "weight": True, "teacher": False}
# A document's index in the corpus, its characters, and its scores.
_RECORD = struct.Struct(f"<qq{len(SCORES)}d")
# Further digits are noise from float16 losses, which would decide ties.
_DIGITS = 6


def score_document(student: StoredDocument, teacher: StoredDocument) -> dict[str, float]:
    """Score a document by two models' losses on its tokens.

    A student token's teacher loss L_T is that of `--aggregation share`: the share of each teacher
    token's loss by the characters that the student token covers. All scores are rounded.

    Returns:
        excess: the student's loss less the teacher's, in nats per character.
        ahead: the share of characters in student tokens with L_T < L_S.
        weight: the mean of min(1, exp(L_S - L_T)) over student tokens, as by `--selection accept`.
        teacher: the teacher's loss, in nats per character.
    """
    ranges = align_spans(student.spans, teacher.spans)
    shares = covered_shares(student.spans, teacher.spans, ranges)
    own = student.losses.astype(np.float64)
    aggregated = aggregate_losses(teacher.losses, ranges, "share", shares)
    # A token without characters has no teacher loss. Its weight is 1, and the teacher is not ahead.
    excess = np.where(ranges[:, 0] == UNMAPPED, 0.0, own - aggregated)
    characters = _characters(student.spans, student.length)
    teacher_total = teacher.losses.sum(dtype=np.float64)
    scores = {
        "excess": (own.sum() - teacher_total) / student.length,
        "ahead": characters[excess > 0].sum() / student.length,
        "weight": np.exp(np.minimum(excess, 0.0)).mean(),
        "teacher": teacher_total / student.length,
    }
    return {name: round(float(scores[name]), _DIGITS) for name in SCORES}


def _characters(spans: Spans, length: int) -> npt.NDArray[np.float64]:
    """Count the characters of every token [N]. If m tokens share one, each gets 1 / m."""
    begun = np.bincount(spans[:, 0], minlength=length + 1)
    ended = np.bincount(spans[:, 1], minlength=length + 1)
    # Every character is in a token, because the spans of a store leave no gap.
    sharing = (begun - ended).cumsum()[:-1]
    before = np.append(0.0, np.cumsum(1 / sharing))
    counts: npt.NDArray[np.float64] = before[spans[:, 1]] - before[spans[:, 0]]
    return counts


def count_missing(corpus: datasets.Dataset, store: Store) -> int:
    """Count the usable documents of a corpus that a store lacks."""
    return sum(text not in store for _, text in _texts(corpus, f"Looking in {store.directory}"))


def _texts(corpus: datasets.Dataset, description: str) -> Iterator[tuple[int, str]]:
    """Read the usable documents with their indices, and show progress."""
    texts = read_texts(corpus, range(len(corpus)))
    yield from tqdm(texts, description, len(corpus), unit="document")


class Ranks:
    """The scores of a corpus's documents, in its order, without those that have no losses.

    They are in a binary file, which need not have a name.
    """

    def __init__(self, records: IO[bytes]) -> None:
        self._records = records
        self.count = 0
        self.means = dict.fromkeys(SCORES, 0.0)

    def score(
        self, corpus: datasets.Dataset, student: Store, teacher: Store, by: str
    ) -> npt.NDArray[np.float64]:
        """Score all documents, and return the scores with one name."""
        values = array("d")
        for index, text in _texts(corpus, "Ranking"):
            own, other = student.document(text), teacher.document(text)
            # A document that a server could not score is stored without tokens.
            if not own or not other or not len(own.losses) or not len(other.losses):
                continue
            scores = score_document(own, other)
            self._records.write(_RECORD.pack(index, len(text), *scores.values()))
            values.append(scores[by])
            self.count += 1
            for name, value in scores.items():
                self.means[name] += (value - self.means[name]) / self.count
        return np.asarray(values, np.float64)

    def rows(self, places: Iterable[int]) -> Iterator[dict[str, float]]:
        """Read the documents at some places of this ranking, counted from 0."""
        for place in places:
            self._records.seek(place * _RECORD.size)
            index, characters, *scores = _RECORD.unpack(self._records.read(_RECORD.size))
            named_scores = dict(zip(SCORES, scores, strict=True))
            yield {"document": index, **named_scores, "characters": characters}

    def text_rows(
        self, places: Iterable[int], corpus: datasets.Dataset
    ) -> Iterator[dict[str, object]]:
        """Read the texts of the documents at increasing places."""
        chosen = (row["document"] for row in self.rows(places))
        next_chosen = next(chosen, None)
        for index, text in _texts(corpus, "Writing"):
            if index == next_chosen:
                yield {"document": index, TEXT: text}
                next_chosen = next(chosen, None)


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line, all of them or nothing."""

    def write(file: BinaryIO) -> None:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    write_file(path, write)


def best_first(values: npt.NDArray[np.float64], by: str) -> IntArray:
    """Return the indices of scores, best first. Equal ones keep their order.

    >>> best_first(np.array([0.5, 2.0, 0.5]), "excess").tolist()
    [1, 0, 2]
    """
    return np.argsort(-values if SCORES[by] else values, kind="stable")


def kept_count(count: int, share: float) -> int:
    """Return the smallest number that is at least this share of a count, exactly.

    >>> kept_count(100, 0.07), kept_count(3, 0.5)
    (7, 2)
    """
    # In floats, 0.07 * 100 is above 7. Printed, a float is the number that was typed.
    return math.ceil(Fraction(str(share)) * count)
