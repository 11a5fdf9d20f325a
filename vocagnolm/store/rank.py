"""Rank the documents of a corpus by the losses of a teacher and a student.

    vocagnolm rank --student_losses S --teacher_losses T --dataset D --output_dir DIR
    vocagnolm rank --student MODEL --teacher_losses T --dataset D --output_dir DIR
    vocagnolm rank ... --by excess --sort        # the best document first
    vocagnolm rank ... --by excess --keep 0.5    # keep the best half, for vocagnolm train --dataset

DIR/ranks.jsonl has one line per document: its index in the corpus, its number of characters, and

    excess     student loss minus teacher loss, in nats per character
    ahead      share of the characters where the teacher's loss is below the student's
    weight     mean token weight under --selection accept
    teacher    teacher loss, in nats per character; the smallest is best

With --keep, DIR/kept.jsonl has the best documents, in corpus order. Losses come from stores of
vocagnolm score, or from models, which first score the corpus into DIR/student_losses or
DIR/teacher_losses. Exit status: 0 done, 2 a wrong argument or file, 3 a loss is not finite.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import corpora_of, in_range, listed
from vocagnolm.shell.io import check_outside, check_writable, claim_names
from vocagnolm.shell.printing import print_main

if TYPE_CHECKING:
    import datasets

    from vocagnolm.store.format import Store

RANKS, KEPT = "ranks.jsonl", "kept.jsonl"
ROLES = ("student", "teacher")
# The names in `ranking.SCORES`, which cannot be imported before the options are read.
_SCORES = ("excess", "ahead", "weight", "teacher")
_OF_MODELS = "dtype batch_tokens trust_remote_code"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("vocagnolm rank", __doc__)
    add = parser.add_argument
    missing = "What to do with documents that are not in a store; default: error."
    for role in ROLES:
        of_role = parser.add_mutually_exclusive_group(required=True)
        help_text = f"Store of the {role}'s losses."
        of_role.add_argument(f"--{role}_losses", type=Path, metavar="STORE", help=help_text)
        of_role.add_argument(f"--{role}", help="Model to score with: a hub name or a directory.")
    parser.add_dataset(required=True)
    add("--output_dir", type=Path, required=True, help=f"For {RANKS}, and {KEPT} with --keep.")
    add(
        "--by", choices=_SCORES, default="excess", help="Score to sort or keep by; default: excess."
    )
    add("--sort", action="store_true", help="Write the best first; default: corpus order.")
    add(
        "--keep",
        type=float,
        metavar="SHARE",
        help="Keep this share of the documents, the best ones.",
    )
    add("--missing_losses", choices=("error", "skip"), default="error", help=missing)
    parser.add_dtype(" of a model")
    add("--batch_tokens", type=int, default=16384, help="Tokens per forward pass of a model.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    in_range(arguments, "(0, 1]", "keep")
    in_range(arguments, "[1, inf)", "batch_tokens")
    if not arguments.sort and arguments.keep is None:
        parser.refuse(arguments, "by", "without --sort or --keep")
    if not arguments.student and not arguments.teacher:
        parser.refuse(arguments, _OF_MODELS, "without a model to score with")
    return arguments


@shell("vocagnolm rank", out_of_memory="lower --batch_tokens or --dtype")
def main(argv: Sequence[str] | None = None) -> None:
    """Rank a corpus."""
    arguments = _parse(argv)
    out: Path = arguments.output_dir
    check_writable(out)
    check_outside(out, listed(arguments.dataset))
    # These imports bring datasets, which --help does not need.
    from vocagnolm.corpus import load_corpus
    from vocagnolm.store.ranking import (
        SCORES,
        best_first,
        kept_count,
        rows_of,
        score_corpus,
        text_rows,
        write_rows,
    )
    from vocagnolm.texts import is_conversations

    ((name, options),) = corpora_of(arguments)
    for file in (RANKS, KEPT):
        if Path(name).resolve() == (out / file).resolve():
            raise ValueError(f"--output_dir {out}: --dataset {name} would be replaced")
    corpus = load_corpus(name, **options)
    if is_conversations(corpus):
        raise ValueError(
            "--dataset has conversations: rank documents, for example by --text_column"
        )
    claim_names(out, [RANKS] if arguments.keep is None else [RANKS, KEPT], "vocagnolm rank")
    student, teacher = _open_stores(arguments, corpus)
    columns = score_corpus(corpus, student, teacher)
    values = columns[arguments.by]
    if not len(values):
        raise ValueError(f"--dataset {name} has no document with losses of both models")
    order = best_first(values, arguments.by)
    write_rows(out / RANKS, rows_of(columns, order if arguments.sort else range(len(values))))
    line = f"{out / RANKS}: {len(values):,} documents"
    if len(values) < len(corpus):
        line += f"; skipped: {len(corpus) - len(values):,}, empty or without losses"
    print_main(line)
    means = [f"{score} {columns[score].mean():.3f}" for score in SCORES]
    print_main(f"means: {', '.join(means)}")
    if arguments.keep is None:
        return
    kept = order[: kept_count(len(values), arguments.keep)]
    write_rows(out / KEPT, text_rows(corpus, columns["document"][kept]))
    last = values[kept[-1]]
    print_main(f"{out / KEPT}: {len(kept):,} documents; the last: {arguments.by} {last:.3f}")


def _open_stores(arguments: argparse.Namespace, corpus: datasets.Dataset) -> list[Store]:
    """Open the store of each role. If there is none, score with the role's model."""
    from vocagnolm.store.format import Store
    from vocagnolm.store.read import missing_documents
    from vocagnolm.store.scoring import check_model, score

    stores = {}
    for role in ROLES:
        directory = getattr(arguments, f"{role}_losses")
        if directory is None:
            continue
        stores[role] = Store(directory)
        # Check this before a model scores for hours.
        if arguments.missing_losses == "error":
            missing = len(list(missing_documents(stores[role], corpus)))
            if missing:
                raise ValueError(
                    f"--{role}_losses {directory} lacks {missing:,} of {len(corpus):,} documents, "
                    "or has another text of them: score this corpus, or leave them out with "
                    "--missing_losses skip"
                )
    if arguments.student and arguments.student == arguments.teacher:
        raise ValueError(f"--student and --teacher are the same model, {arguments.student}")
    unscored_roles = [role for role in ROLES if role not in stores]
    # Look at both models before the first one scores for hours.
    for role in unscored_roles:
        check_model(_scoring_options(arguments, role))
    for role in unscored_roles:
        options = _scoring_options(arguments, role)
        score(options)
        stores[role] = Store(options.output_dir)
    student, teacher = (stores[role] for role in ROLES)
    if student.fingerprint() == teacher.fingerprint():
        raise ValueError(
            f"{student.directory} and {teacher.directory} are the same losses: give a student's "
            "and a teacher's"
        )
    return [student, teacher]


def _scoring_options(arguments: argparse.Namespace, role: str) -> argparse.Namespace:
    """Return the options of `vocagnolm score` that score the corpus with the model of a role."""
    from vocagnolm.store.score import make_parser

    options = make_parser().parse_args([])
    # For `vocagnolm score`, any model is a teacher.
    options.teacher, options.role = getattr(arguments, role), role
    options.output_dir = arguments.output_dir / f"{role}_losses"
    options.dataset = [arguments.dataset]
    for name in ("dataset_config", "dataset_split", "text_column", *_OF_MODELS.split()):
        setattr(options, name, getattr(arguments, name))
    return options
