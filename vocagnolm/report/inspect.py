"""Show a text with its tokens kept, dropped and unmapped, and why.

    vocagnolm inspect --text "1 + 1 = 3" --student S --teacher T
    vocagnolm inspect --text_file page.txt --student S --teacher T --table
    vocagnolm inspect --dataset D --documents 3 --student S --teacher T --output_dir DIR

Every token of the student is marked in the terminal, with `--table` listed with both losses and the
teacher's pieces; `--output_dir` gets a page for the browser and the numbers. A text that exceeds a
context is cut, and the tokens of each part compete by themselves. Exit status: 0 done, 2 a wrong
argument or file, 3 losses that are not finite.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vocagnolm.chat.reading import TRAIN_ON
from vocagnolm.cli import Parser, corpora_of, shell
from vocagnolm.io import check_writable
from vocagnolm.method import Aggregation, Method, Unmapped

if TYPE_CHECKING:
    import datasets

    from vocagnolm.report.measure import LoadedPair

# Of the files in --output_dir.
FILE_NAME = "guidance"


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("vocagnolm inspect", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="The text itself.")
    source.add_argument("--text_file", type=Path, help="A file that is one text, in UTF-8.")
    source.add_argument("--dataset", help="As for train.py: files, a directory, or a hub name.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--documents", type=int, help="Documents of --dataset; default: 1.")
    which.add_argument("--document", type=int, help="Number of a single document, from 0.")
    parser.add_dataset(source=False)
    for role in ("student", "teacher"):
        add(f"--{role}", required=True, help="Causal LM: a hub name or a directory.")
        add(f"--{role}_revision", help="Branch, tag or commit on the hub.")
        add(f"--{role}_tokenizer", help="Its tokenizer, if it is not with its weights.")
        add(f"--{role}_chat_template", help="plain, chatml or a file; default: its tokenizer's.")
    parser.add_dtype(" of the teacher (the student's is float32)")
    add("--attn_implementation", help="As in transformers.")
    add("--trust_remote_code", action="store_true")
    add("--max_length", type=int, help="Student tokens of a part; default: 2048 or its context.")
    add("--top_k", type=float, default=0.4, help="Share of the mapped tokens kept, Eq. 4.")
    add("--aggregation", choices=get_args(Aggregation), default="max", help="Eq. 2.")
    add("--unmapped", choices=get_args(Unmapped), default="include", help="Section 6.2.")
    add("--train_on", choices=TRAIN_ON, default=TRAIN_ON[0], help="Of conversations.")
    add("--table", action="store_true", help="List all tokens with losses and pieces.")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("--output_dir", type=Path, help=f"Gets {FILE_NAME}.html and {FILE_NAME}.json.")
    return parser.parse_args(argv)


@shell("vocagnolm inspect", out_of_memory="lower --max_length")
def main(argv: Sequence[str] | None = None) -> None:
    """Show texts."""
    arguments = _parse(argv)
    from vocagnolm.report.measure import view_documents
    from vocagnolm.report.render import render_table, render_text, write_view
    from vocagnolm.report.view import GuidanceView, ViewSettings

    # Checked before anything is loaded.
    guidance = Method("vocagnolm", arguments.top_k, arguments.aggregation, arguments.unmapped)
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    corpus, first = _load_documents(arguments)
    pair = _load(arguments, guidance)
    length = pair.student_reader.limit
    competition = f"the mapped tokens of each text of up to {length:,} tokens"
    settings = ViewSettings(arguments.student, arguments.teacher, guidance, competition)
    views = view_documents(corpus, pair, guidance, first, arguments.train_on)
    view = GuidanceView(settings, tuple(views))
    if arguments.output_dir:
        write_view(view, arguments.output_dir, FILE_NAME)
    sys.stdout.write(render_text(view, color=_has_color(arguments.color)))
    if arguments.table:
        sys.stdout.write("\n" + render_table(view))
    if arguments.output_dir:
        sys.stdout.write(f"\nwritten: {arguments.output_dir / FILE_NAME}.html, {FILE_NAME}.json\n")


def _has_color(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _load(arguments: argparse.Namespace, guidance: Method) -> "LoadedPair":
    """Load both models: the student in float32, the teacher in `--dtype`."""
    import torch

    from vocagnolm.dist import is_on_cpu
    from vocagnolm.report.measure import LoadedPair
    from vocagnolm.run.job import load_weights, read_models
    from vocagnolm.run.options import LoadOptions, ModelOptions, PackOptions
    from vocagnolm.teacher import ResidentTeacher
    from vocagnolm.token_loss import add_token_losses

    # As a run of train.py would have it, so that the same checks apply.
    given = vars(arguments) | {
        "teacher_dtype": arguments.dtype,
        "max_length": arguments.max_length or PackOptions.max_length,
    }
    for name in ("teacher", *(f"teacher_{x}" for x in ("revision", "tokenizer", "chat_template"))):
        given[name] = [given[name]] if given[name] else None

    def pick(kind: Any) -> Any:
        return kind(**{each.name: given[each.name] for each in fields(kind) if each.name in given})

    device = torch.device("cpu") if is_on_cpu() else torch.accelerator.current_accelerator()
    assert device is not None
    options = pick(ModelOptions), pick(LoadOptions), pick(PackOptions)
    pair = read_models(*options, guidance, device, shorten=arguments.max_length is None)
    student, teachers = load_weights(pair)
    assert pair.guide
    assert isinstance(teachers, list)
    return LoadedPair(
        add_token_losses(student.to(device).train(False)),
        pair.reader,
        ResidentTeacher(teachers, device),
        pair.guide.readers[0],
        device,
    )


def _load_documents(arguments: argparse.Namespace) -> tuple["datasets.Dataset", int]:
    """Return the texts to show, in the column `text`, and the number of the first."""
    import datasets

    from vocagnolm.corpus import load_sample
    from vocagnolm.texts.column import TEXT

    if arguments.dataset:
        # The documents before a single one are read, and skipped.
        number = arguments.document
        count = (arguments.documents or 1) if number is None else number + 1
        ((name, options),) = corpora_of(arguments)
        corpus, _ = load_sample(name, count, **options)
        if number is None:
            return corpus, 0
        if number >= len(corpus):
            raise ValueError(
                f"--document {number}: --dataset {arguments.dataset} has {len(corpus):,} documents,"
                " numbered from 0: give a smaller number"
            )
        return corpus.select([number]), number
    text = arguments.text
    if arguments.text_file:
        # As bytes, because a line end is a token of its own.
        text = arguments.text_file.read_bytes().decode()
    return datasets.Dataset.from_dict({TEXT: [text]}), 0
