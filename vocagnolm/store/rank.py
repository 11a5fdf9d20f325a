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

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vocagnolm.cli import Parser, shell
from vocagnolm.fields import in_range
from vocagnolm.store.score import make_parser

# The names in `ranking.SCORES`, which cannot be imported before the options are read.
_SCORES = ("excess", "ahead", "weight", "teacher")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("vocagnolm rank", __doc__)
    add = parser.add_argument
    missing = "What to do with documents that are not in a store; default: error."
    roles = ("student", "teacher")
    for role in roles:
        of_role = parser.add_mutually_exclusive_group(required=True)
        help_text = f"Store of the {role}'s losses."
        of_role.add_argument(f"--{role}_losses", type=Path, metavar="STORE", help=help_text)
        model_help = "Model to score with: a hub name or a directory."
        add(f"--{role}", group=of_role, hub="model", help=model_help)
    parser.add_dataset(required=True)
    add("--output_dir", type=Path, required=True, help="For the results.")
    add(
        "--by",
        choices=_SCORES,
        default="excess",
        needs=["sort", "keep"],
        help="Score to sort or keep by; default: excess.",
    )
    add("--sort", action="store_true", help="Write the best first; default: corpus order.")
    add(
        "--keep",
        type=float,
        metavar="SHARE",
        help="Keep this share of the documents, the best ones.",
    )
    add("--missing_losses", choices=("error", "skip"), default="error", help=missing)
    parser.add_dtype(" of a model", needs=roles)
    add = partial(add, needs=roles)
    add("--batch_tokens", type=int, default=16384, help="Tokens per forward pass of a model.")
    add("--trust_remote_code", action="store_true")
    arguments = parser.parse_args(argv)
    in_range(arguments, "(0, 1]", "keep")
    in_range(arguments, "[1, inf)", "batch_tokens")
    return arguments


@shell("vocagnolm rank", out_of_memory="lower --batch_tokens or --dtype")
def main(argv: Sequence[str] | None = None) -> None:
    """Rank a corpus."""
    arguments = _parse(argv)
    # This imports torch and datasets, which --help does not need.
    from vocagnolm.store.ranking import rank

    rank(arguments, make_parser().parse_args([]))
