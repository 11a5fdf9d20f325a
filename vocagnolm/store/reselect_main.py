"""Choose tokens under other settings or teachers, from stores: no model is loaded.

    vocagnolm score --teacher STUDENT --dataset D --output_dir S0     # the student's own losses
    vocagnolm reselect --student STUDENT --student_losses S0 --teacher_losses S1 S2 --dataset D

Every combination of the settings given is compared with the first one. A store holds the losses of
any model on its own tokens, so the student's losses are a store, too. Exit status: 0 done, 2 a
wrong argument or file.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from vocagnolm.cli import Parser, say, shell
from vocagnolm.guidance import Aggregation, Unmapped

if TYPE_CHECKING:
    from vocagnolm.store.reselect import Selections


@shell("vocagnolm reselect")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare settings."""
    arguments = parse_reselect(argv)
    from vocagnolm.store.reselect import write_selections

    selections, table = select(arguments)
    if arguments.output_dir:
        write_selections(selections, table, arguments.output_dir)
    say(table + "\n")


def parse_reselect(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser("vocagnolm reselect", __doc__)
    add = parser.add_argument
    add("--student", required=True, help="Whose tokens: a hub name or a directory.")
    add("--student_losses", type=Path, required=True, help="A store of the student's own losses.")
    add("--teacher_losses", type=Path, nargs="+", required=True, help="Stores of teachers.")
    parser.add_dataset(required=True, several=True)
    add("--max_length", type=int, default=2048, help="Student tokens of a block.")
    add("--top_k", type=float, nargs="+", default=[0.4], help="Shares of the tokens, Eq. 4.")
    add("--aggregation", nargs="+", choices=get_args(Aggregation), default=["max"], help="Eq. 2.")
    add("--unmapped", nargs="+", choices=get_args(Unmapped), default=["include"])
    add("--output_dir", type=Path, help="Gets reselect.json, reselect.md and reselect.png.")
    arguments = parser.parse_args(argv)
    return arguments


def select(arguments: argparse.Namespace) -> tuple["Selections", str]:
    """Choose tokens under all combinations; returns them with the table to show."""
    from vocagnolm.objective import Method
    from vocagnolm.store.reselect import Candidate, align_stores, reselect, selection_table
    from vocagnolm.store.scoring import load_corpora
    from vocagnolm.store.store import Store
    from vocagnolm.texts.tokenizers import load_tokenizer

    # Several stores may be of one teacher, so a store is named by its place.
    names = [path.name for path in arguments.teacher_losses]
    if len(set(names)) < len(names):
        names = list(map(str, arguments.teacher_losses))
    candidates = [
        Candidate(store, name, Method("vocagnolm", top_k, aggregation, unmapped))
        for (store, name), aggregation, unmapped, top_k in itertools.product(
            enumerate(names, 1), arguments.aggregation, arguments.unmapped, arguments.top_k
        )
    ]
    tokenizer = load_tokenizer(arguments.student, "student")
    stores = [Store(path) for path in (arguments.student_losses, *arguments.teacher_losses)]
    corpus = load_corpora(arguments)
    blocks, collator = align_stores(stores, tokenizer, corpus, arguments.max_length)
    selections = reselect(blocks, collator, candidates, len(tokenizer))
    return selections, selection_table(selections, tokenizer)
