"""Rank the documents or conversations of a corpus by the losses of a teacher and a student.

    vocagnolm rank --student_losses S --teacher_losses T --dataset D --output_dir DIR
    vocagnolm rank --student MODEL --teacher_losses T --dataset D --output_dir DIR
    vocagnolm rank ... --by excess --sort        # the best document first
    vocagnolm rank ... --by excess --keep 0.5    # keep the best half, for vocagnolm train --dataset
    vocagnolm rank ... --label_column is_good    # which score finds the good documents?

A document may be a conversation, of which only the answers are scored. DIR/ranks.jsonl has one line
per document: its index in the corpus, its number of characters, and

    excess     student loss minus teacher loss, in nats per character
    ahead      share of the characters where the teacher's loss is below the student's
    weight     mean token weight under --selection accept
    teacher    teacher loss, in nats per character; the smallest is best
    student    student loss, in nats per character; the smallest is best

With --keep, DIR/kept.jsonl has the best documents, in corpus order. What it keeps of each source is
printed first, with examples; with --dry_run, nothing else happens. With --label_column, each score
is judged by how well it finds the documents that a column of the corpus calls good.

Losses come from stores of vocagnolm score, or from models, which first score the corpus into
DIR/student_losses or DIR/teacher_losses. Exit status: 0 done, 2 a wrong argument or file, 3 a loss
is not finite.
"""

from __future__ import annotations

import argparse
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from vocagnolm.alignment import aggregate_losses, align_spans, covered_shares
from vocagnolm.chat.formats import SKIPPED, Conversation
from vocagnolm.cli import Parser, shell
from vocagnolm.conventions import TEXT, UNMAPPED, IntArray, Spans
from vocagnolm.fields import OptionError, corpora_of, in_range
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.shell.io import print_main, write_file
from vocagnolm.store import choice
from vocagnolm.store.format import Store, StoredDocument
from vocagnolm.store.score import make_parser

if TYPE_CHECKING:
    import datasets

    from vocagnolm.store.read import StoredReader

_Floats = npt.NDArray[np.float64]
# One value per document, by name.
_Columns = Mapping[str, npt.NDArray[Any]]
RANKS, KEPT = "ranks.jsonl", "kept.jsonl"
ROLES = ("student", "teacher")
# The scores, and whether a larger one is better.
SCORES = {"excess": True, "ahead": True, "weight": True, "teacher": False, "student": False}
# Examples from each end of the order.
_EXAMPLES = 10
# Further digits are noise from float16 losses, which would decide ties.
_DIGITS = 6


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("vocagnolm rank", __doc__)
    add = parser.add_argument
    missing = "What to do with documents that are not in a store; default: error."
    for role in ROLES:
        of_role = parser.add_mutually_exclusive_group(required=True)
        help_text = f"Stores of the {role}'s losses, which may have parts of the corpus."
        of_role.add_argument(
            f"--{role}_losses", type=Path, nargs="+", metavar="STORE", help=help_text
        )
        model_help = "Model to score with: a hub name or a directory."
        add(f"--{role}", group=of_role, hub="model", help=model_help)
        template_help = "For conversations: plain, chatml or a file; default: the model's own."
        add(f"--{role}_chat_template", needs=[role], help=template_help)
    parser.add_dataset(required=True)
    add("--output_dir", type=Path, required=True, help="For the results.")
    add(
        "--by",
        choices=list(SCORES),
        default="excess",
        needs=["sort", "keep"],
        help="Score to sort or keep by; default: excess.",
    )
    add("--reverse", action="store_true", needs=["sort", "keep"], help="Best is the other end.")
    add("--sort", action="store_true", help="Write the best first; default: corpus order.")
    add(
        "--keep",
        type=float,
        metavar="SHARE",
        help="Keep this share of the documents, the best ones.",
    )
    add("--dry_run", action="store_true", needs=["keep"], help=f"Write no {KEPT}.")
    add("--group_column", needs=["keep"], help="Column of sources; default: the files.")
    add("--label_column", help="Column that says which documents are good: judge each score.")
    add("--good", needs=["label_column"], help="Label of good documents; default: true or 1.")
    add("--missing_losses", choices=("error", "skip"), default="error", help=missing)
    parser.add_dtype(" of a model", needs=ROLES)
    add = partial(add, needs=ROLES)
    add("--batch_tokens", type=int, default=16384, help="Tokens per forward pass of a model.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    in_range(arguments, "(0, 1]", "keep")
    in_range(arguments, "[1, inf)", "batch_tokens")
    return arguments


@shell("vocagnolm rank", out_of_memory="lower --batch_tokens or --dtype")
def main(argv: Sequence[str] | None = None) -> None:
    """Rank a corpus, and write its files."""
    options = _parse(argv)
    # These import torch and datasets, which --help does not need.
    from vocagnolm.corpus import load_corpus, load_values
    from vocagnolm.shell.dist import connect, rank0

    out: Path = options.output_dir
    check_output_directory(out, RANKS, [options.dataset])
    if Path(options.dataset).resolve() == (out / KEPT).resolve():
        raise OptionError("output_dir", f"{out} has the corpus, as {KEPT}: give another directory")
    ((name, corpus_options),) = corpora_of(options)
    corpus = load_corpus(name, **corpus_options)
    # A wrong name is an error before a model scores for hours.
    good = sources = None
    if options.label_column:
        labels = load_values(name, options.label_column, "label_column", **corpus_options)
        good = choice.good_labels(labels, options.good)
    if options.keep:
        sources = load_values(name, options.group_column, "group_column", **corpus_options)
    connect()
    with ExitStack() as stack:
        # Several processes score together. The first one owns the directory for all of them.
        rank0(lambda: stack.enter_context(output_directory(out, RANKS)))
        readers = _open_stores(options, corpus)
        columns = score_corpus(corpus, readers)
        _write(options, corpus, columns, good, sources)


def _open_stores(options: argparse.Namespace, corpus: datasets.Dataset) -> list[StoredReader]:
    """Open the stores of each role. If there is none, score the corpus with the role's model."""
    from vocagnolm.store.read import StoredReader
    from vocagnolm.store.scoring import prepare, run

    for kind in ("student", "student_losses"):
        name = getattr(options, kind)
        other = kind.replace("student", "teacher")
        if name and name == getattr(options, other):
            raise OptionError(kind, f"and --{other} are the same")
    # Open and check everything before a model scores for hours.
    readers, jobs = {}, {}
    for role in ROLES:
        if getattr(options, f"{role}_losses"):
            readers[role] = _given_stores(options, role, corpus)
    for role in ROLES:
        if role not in readers:
            job = argparse.Namespace(**(vars(make_parser().parse_args([])) | vars(options)))
            # For `vocagnolm score`, any model is a teacher.
            job.teacher, job.role, job.dataset = getattr(options, role), role, [options.dataset]
            job.teacher_chat_template = getattr(options, f"{role}_chat_template")
            job.output_dir = options.output_dir / f"{role}_losses"
            jobs[role] = prepare(job)
    for role, prepared in jobs.items():
        run(prepared)
        readers[role] = StoredReader([Store(prepared.options.output_dir)])
    return [readers["student"], readers["teacher"]]


def _given_stores(options: argparse.Namespace, role: str, corpus: datasets.Dataset) -> StoredReader:
    """Open the stores that are given for a role."""
    from vocagnolm.store.read import StoredReader
    from vocagnolm.texts import is_conversations

    reader = StoredReader([Store(directory) for directory in getattr(options, f"{role}_losses")])
    if len(reader.teachers) > 1:
        several = "; ".join(reader.describe())
        fault = f"are of several models ({several}): give those of one"
        raise OptionError(f"{role}_losses", fault)
    if is_conversations(corpus):
        reader.check_templates()
    if options.missing_losses == "error":
        require_all(corpus, reader)
    return reader


def _write(
    options: argparse.Namespace,
    corpus: datasets.Dataset,
    columns: _Columns,
    good: _Floats | None,
    sources: Sequence[str | None] | None,
) -> None:
    """Write the scores of all documents and the best documents, and print what was written."""
    out: Path = options.output_dir
    values = columns[options.by]
    if not len(values):
        raise OptionError(
            "dataset", f"{options.dataset} has no document with losses of both models"
        )
    largest = SCORES | {options.by: SCORES[options.by] != options.reverse}
    order = choice.best_first(values, largest=largest[options.by])
    write_rows(out / RANKS, rows_of(columns, order if options.sort else range(len(values))))
    line = f"{out / RANKS}: {len(values):,} documents"
    if len(values) < len(corpus):
        line += f"; skipped: {len(corpus) - len(values):,}, empty or without losses"
    print_main(line)
    means = [f"{score} {columns[score].mean():.3f}" for score in SCORES]
    print_main(f"means: {', '.join(means)}")
    if good is not None:
        labels = good[columns["document"]]
        print_main("\n".join(choice.judgement(columns, largest, labels, options.keep)))
    if sources is None:
        return
    kept = order[: choice.kept_count(len(values), options.keep)]
    _preview(options, corpus, sources, columns, order)
    what = f"{len(kept):,} documents; the last: {options.by} {values[kept[-1]]:.3f}"
    if not options.dry_run:
        documents = np.sort(columns["document"][kept]).tolist()
        write_rows(out / KEPT, _kept_rows(corpus, documents))
    print_main(f"{out / KEPT}{', not written' if options.dry_run else ''}: {what}")


def _preview(
    options: argparse.Namespace,
    corpus: datasets.Dataset,
    sources: Sequence[str | None],
    columns: _Columns,
    order: IntArray,
) -> None:
    """Print what is kept of each source, and the documents at both ends of the order."""
    scored = [str(sources[document]) for document in columns["document"]]
    is_kept = np.zeros(len(order), bool)
    is_kept[order[: choice.kept_count(len(order), options.keep)]] = True
    print_main("\n".join(choice.kept_by_source(scored, columns["tokens"], is_kept)))
    for end, indices in (("best", order[:_EXAMPLES]), ("worst", order[_EXAMPLES:][-_EXAMPLES:])):
        print_main(f"{end} by {options.by}:")
        texts = corpus.select(columns["document"][indices])[TEXT]
        for value, text in zip(columns[options.by][indices], texts, strict=True):
            print_main(f"{value:9.3f}  {choice.one_line(text)}")


def _kept_rows(corpus: datasets.Dataset, documents: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield documents with all that training reads. Their indices lead to the user's columns."""
    columns: dict[str, object] = {}
    for row in _training_rows(corpus, documents):
        columns |= dict.fromkeys(row)
    # All conversations of a file have the same columns.
    is_mixed = {"messages", "prompt"} <= columns.keys()
    if is_mixed:
        del columns["prompt"], columns["completion"]
    rows = _training_rows(corpus, documents, as_messages=is_mixed)
    for index, row in zip(documents, rows, strict=True):
        # Each row has all columns, because a file's columns are those of its first rows.
        yield {"document": index} | columns | row


def _training_rows(
    corpus: datasets.Dataset, documents: Sequence[int], *, as_messages: bool = False
) -> Iterator[dict[str, object]]:
    for row in corpus.select(documents):
        row.pop(SKIPPED, None)
        if "roles" in row:
            row = Conversation(**row).as_row(as_messages=as_messages)
        yield row


def rows_of(
    columns: Mapping[str, npt.NDArray[Any]], indices: Iterable[int]
) -> Iterator[dict[str, float]]:
    """Return rows of columns."""
    for index in indices:
        yield {name: values[index].item() for name, values in columns.items()}


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object per line, all of them or nothing."""

    def write(file: BinaryIO) -> None:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

    write_file(path, write)


# -- Scores ---------------------------------------------------------------------------------------


def score_document(student: StoredDocument, teacher: StoredDocument) -> dict[str, float]:
    """Score a document by two models' losses on its tokens.

    A student token's teacher loss L_T is that of `--aggregation share`: the share of each teacher
    token's loss by the characters that the student token covers. All scores are rounded.

    Returns:
        excess: the student's loss less the teacher's, in nats per character.
        ahead: the share of characters in student tokens with L_T < L_S.
        weight: the mean of min(1, exp(L_S - L_T)) over student tokens, as by `--selection accept`.
        teacher: the teacher's loss, in nats per character.
        student: the student's loss, in nats per character.
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
        "student": student_losses.sum() / student.length,
    }
    return {name: round(float(scores[name]), _DIGITS) for name in SCORES}


def _characters(spans: Spans, length: int) -> npt.NDArray[np.float64]:
    """Count the characters of every token [N]. If m tokens share one, each gets 1 / m."""
    begun = np.bincount(spans[:, 0], minlength=length + 1)
    ended = np.bincount(spans[:, 1], minlength=length + 1)
    # A character that a template leaves out is in no token.
    sharing = (begun - ended).cumsum()[:-1].clip(min=1)
    before = np.append(0.0, np.cumsum(1 / sharing))
    counts: npt.NDArray[np.float64] = before[spans[:, 1]] - before[spans[:, 0]]
    return counts


def require_all(corpus: datasets.Dataset, reader: StoredReader) -> None:
    """Reject stores that lack documents of a corpus."""
    from vocagnolm.texts import read_texts

    missing = 0
    for _, content in read_texts(corpus, range(len(corpus))):
        missing += reader.scored(content) is None
    if missing:
        directories = ", ".join(str(store.directory) for store in reader.stores)
        raise ValueError(
            f"{directories}: {missing:,} of {len(corpus):,} documents are missing, or have "
            "another text there: score this corpus, or skip them with --missing_losses skip"
        )


def score_corpus(
    corpus: datasets.Dataset, readers: Sequence[StoredReader]
) -> dict[str, npt.NDArray[Any]]:
    """Score the documents of which both the student's and the teacher's stores have losses.

    Of a conversation, only the answers are scored. Returns columns, in the order of the corpus: the
    index `document`, the scores, and the numbers of `characters` and of the student's `tokens`.
    """
    from tqdm.auto import tqdm

    from vocagnolm.texts import read_texts

    columns: dict[str, array[Any]] = {"document": array("q")}
    for name in SCORES:
        columns[name] = array("d")
    columns |= {"characters": array("q"), "tokens": array("q")}
    contents = read_texts(corpus, range(len(corpus)))
    for index, content in tqdm(contents, "Ranking", len(corpus), unit="document"):
        documents = []
        for reader in readers:
            document = reader.scored(content)
            # A document that a server could not score is stored without tokens.
            if document is not None and len(document.losses):
                documents.append(document)
        if len(documents) < 2:
            continue
        columns["document"].append(index)
        columns["characters"].append(documents[0].length)
        columns["tokens"].append(len(documents[0].losses))
        for name, value in score_document(*documents).items():
            columns[name].append(value)
    return {name: np.asarray(values) for name, values in columns.items()}
