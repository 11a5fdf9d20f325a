"""Ranks the documents of a corpus by how much they have to teach.

Two stores have a student's and a teacher's losses on the corpus. Their tokenizers may differ, and
losses are matched by characters.
"""

import json
import math
from argparse import Namespace
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from vocagnolm.alignment import aggregate_losses, align_spans, covered_shares
from vocagnolm.conventions import TEXT, UNMAPPED, IntArray, Spans
from vocagnolm.corpus import load_corpus
from vocagnolm.fields import OptionError, corpora_of
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.shell.dist import connect, rank0
from vocagnolm.shell.io import write_file
from vocagnolm.shell.printing import print_main
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.store.read import missing_documents
from vocagnolm.store.scoring import check_model, score
from vocagnolm.texts import is_conversations, read_texts

RANKS, KEPT = "ranks.jsonl", "kept.jsonl"
ROLES = ("student", "teacher")
# The scores, and whether a larger one is better.
SCORES = {"excess": True, "ahead": True, "weight": True, "teacher": False}
# Further digits are noise from float16 losses, which would decide ties.
_DIGITS = 6


def rank(options: Namespace, scoring: Namespace) -> None:
    """Rank a corpus by the options of `vocagnolm rank`, and write its files.

    A model scores the corpus by the options `scoring` of `vocagnolm score`.
    """
    out: Path = options.output_dir
    check_output_directory(out, RANKS, [options.dataset])
    ((name, corpus_options),) = corpora_of(options)
    for file in (RANKS, KEPT):
        if Path(name).resolve() == (out / file).resolve():
            raise OptionError("output_dir", f"{out}: --dataset {name} would be replaced")
    corpus = load_corpus(name, **corpus_options)
    if is_conversations(corpus):
        raise OptionError(
            "dataset", "has conversations: rank documents, for example by --text_column"
        )
    connect()
    with ExitStack() as stack:
        # Several processes score together. The first one owns the directory for all of them.
        rank0(lambda: stack.enter_context(output_directory(out, RANKS)))
        student, teacher = _open_stores(options, scoring, corpus)
        _write(options, corpus, score_corpus(corpus, student, teacher))


def _write(options: Namespace, corpus: datasets.Dataset, columns: Mapping[str, Any]) -> None:
    """Write the scores of all documents and the best documents, and print what was written."""
    out: Path = options.output_dir
    values = columns[options.by]
    if not len(values):
        raise OptionError(
            "dataset", f"{options.dataset} has no document with losses of both models"
        )
    order = best_first(values, options.by)
    write_rows(out / RANKS, rows_of(columns, order if options.sort else range(len(values))))
    line = f"{out / RANKS}: {len(values):,} documents"
    if len(values) < len(corpus):
        line += f"; skipped: {len(corpus) - len(values):,}, empty or without losses"
    print_main(line)
    means = [f"{score} {columns[score].mean():.3f}" for score in SCORES]
    print_main(f"means: {', '.join(means)}")
    if options.keep is None:
        return
    kept = order[: kept_count(len(values), options.keep)]
    write_rows(out / KEPT, text_rows(corpus, np.sort(columns["document"][kept])))
    last = values[kept[-1]]
    print_main(f"{out / KEPT}: {len(kept):,} documents; the last: {options.by} {last:.3f}")


def _open_stores(options: Namespace, scoring: Namespace, corpus: datasets.Dataset) -> list[Store]:
    """Open the store of each role. If there is none, score with the role's model."""
    stores = {}
    for role in ROLES:
        directory = getattr(options, f"{role}_losses")
        if directory is not None:
            stores[role] = Store(directory)
            # Check this before a model scores for hours.
            if options.missing_losses == "error":
                _check_complete(stores[role], corpus, f"--{role}_losses")
    if options.student and options.student == options.teacher:
        raise OptionError("student", f"and --teacher are the same model, {options.student}")
    jobs = {}
    for role in ROLES:
        if role not in stores:
            jobs[role] = _scoring_options(options, scoring, role)
    # Look at both models before the first one scores for hours.
    for job in jobs.values():
        check_model(job)
    for role, job in jobs.items():
        score(job)
        stores[role] = Store(job.output_dir)
    student, teacher = (stores[role] for role in ROLES)
    if student.fingerprint() == teacher.fingerprint():
        raise ValueError(
            f"{student.directory} and {teacher.directory} are the same losses: give a student's "
            "and a teacher's"
        )
    return [student, teacher]


def _check_complete(store: Store, corpus: datasets.Dataset, option: str) -> None:
    """Raise a ValueError if a store lacks documents of a corpus."""
    missing = len(list(missing_documents(store, corpus)))
    if missing:
        raise ValueError(
            f"{option} {store.directory} lacks {missing:,} of {len(corpus):,} documents, or has "
            "another text of them: score this corpus, or skip them with --missing_losses skip"
        )


def _scoring_options(options: Namespace, scoring: Namespace, role: str) -> Namespace:
    """Return the options of `vocagnolm score` that score the corpus with the model of a role."""
    job = Namespace(**vars(scoring))
    # For `vocagnolm score`, any model is a teacher.
    job.teacher, job.role = getattr(options, role), role
    job.output_dir = options.output_dir / f"{role}_losses"
    job.dataset = [options.dataset]
    for name in ("dataset_config", "dataset_split", "text_column"):
        setattr(job, name, getattr(options, name))
    for name in ("dtype", "batch_tokens", "trust_remote_code"):
        setattr(job, name, getattr(options, name))
    return job


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
    student_losses = student.losses.astype(np.float64)
    aggregated = aggregate_losses(teacher.losses, ranges, "share", shares)
    # A token without characters has no teacher loss. Its weight is 1, and the teacher is not ahead.
    excess = np.where(ranges[:, 0] == UNMAPPED, 0.0, student_losses - aggregated)
    characters = _characters(student.spans, student.length)
    teacher_total = teacher.losses.sum(dtype=np.float64)
    scores = {
        "excess": (student_losses.sum() - teacher_total) / student.length,
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
    texts = read_texts(corpus, range(len(corpus)))
    for index, text in tqdm(texts, "Ranking", len(corpus), unit="document"):
        documents = []
        for store in (student, teacher):
            document = store.document(text)
            # A document that a server could not score is stored without tokens.
            if document is not None and len(document.losses):
                documents.append(document)
        if len(documents) < 2:
            continue
        columns["document"].append(index)
        columns["characters"].append(len(text))
        for name, value in score_document(*documents).items():
            columns[name].append(value)
    return {name: np.asarray(values) for name, values in columns.items()}


def rows_of(
    columns: Mapping[str, npt.NDArray[Any]], indices: Iterable[int]
) -> Iterator[dict[str, float]]:
    """Return rows of columns."""
    for index in indices:
        yield {name: values[index].item() for name, values in columns.items()}


def text_rows(corpus: datasets.Dataset, documents: IntArray) -> Iterator[dict[str, object]]:
    """Read the texts of some documents by their indices."""
    for index, row in zip(documents.tolist(), corpus.select(documents), strict=True):
        yield {"document": index, TEXT: row[TEXT]}


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
