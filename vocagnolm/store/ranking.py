"""Scores how much a document has to teach, from both models' stored losses, and writes the files.

The two stores are of one corpus and any two tokenizers, and are matched by characters.
"""

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

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


def score_corpus(
    corpus: datasets.Dataset, student: Store, teacher: Store
) -> dict[str, npt.NDArray[Any]]:
    """Score the documents for which both stores have losses, in the order of the corpus.

    Returns columns: the index `document` in the corpus, the scores, and `characters`.
    """
    columns: dict[str, array[Any]] = {"document": array("q")}
    for name in SCORES:
        columns[name] = array("d")
    columns["characters"] = array("q")
    for index, text in _texts(corpus, "Ranking"):
        own, other = student.document(text), teacher.document(text)
        # A document that a server could not score is stored without tokens.
        if not own or not other or not len(own.losses) or not len(other.losses):
            continue
        columns["document"].append(index)
        columns["characters"].append(len(text))
        for name, value in score_document(own, other).items():
            columns[name].append(value)
    return {name: np.asarray(values) for name, values in columns.items()}


def rows_of(
    columns: Mapping[str, npt.NDArray[Any]], indices: Iterable[int]
) -> Iterator[dict[str, float]]:
    """Return rows of columns."""
    for index in indices:
        yield {name: values[index].item() for name, values in columns.items()}


def text_rows(corpus: datasets.Dataset, documents: IntArray) -> Iterator[dict[str, object]]:
    """Read the texts of some documents, in the order of the corpus."""
    is_wanted = np.zeros(len(corpus), np.bool_)
    is_wanted[documents] = True
    for index, text in _texts(corpus, "Writing"):
        if is_wanted[index]:
            yield {"document": index, TEXT: text}


def _texts(corpus: datasets.Dataset, description: str) -> Iterator[tuple[int, str]]:
    """Read the usable documents with their indices, and show progress."""
    texts = read_texts(corpus, range(len(corpus)))
    yield from tqdm(texts, description, len(corpus), unit="document")


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
