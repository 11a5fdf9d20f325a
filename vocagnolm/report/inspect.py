"""Show a text with its tokens kept, dropped and unmapped, and why.

    vocagnolm inspect --text "1 + 1 = 3" --student S --teacher T
    vocagnolm inspect --dataset D --document 0 17 --student S --teacher T --output_dir DIR

Every token of the student is marked in the terminal, with `--table` listed with both losses and the
teacher's pieces; `--output_dir` gets a page for the browser. A text that exceeds a context
is cut, and the tokens of each part compete by themselves. Exit status: 0 done, 2 a wrong
argument or file, 3 losses that are not finite.
"""

import argparse
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
    from vocagnolm.report.view import GuidanceView

PAGE = "guidance.html"


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("vocagnolm inspect", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="The text itself.")
    source.add_argument("--dataset", help="As for train.py: files, a directory, or a hub name.")
    which = "Indices of documents of --dataset, from 0; default: 0."
    add("--document", type=int, nargs="+", default=[0], metavar="INDEX", help=which)
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
    add("--output_dir", type=Path, help=f"Gets {PAGE}.")
    return parser.parse_args(argv)


@shell("vocagnolm inspect", out_of_memory="lower --max_length")
def main(argv: Sequence[str] | None = None) -> None:
    """Show texts."""
    arguments = _parse(argv)
    from vocagnolm.report.render import render_table, render_text, write_view

    # Checked before anything is loaded.
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    view = look(arguments)
    sys.stdout.write(render_text(view))
    if arguments.table:
        sys.stdout.write("\n" + render_table(view))
    if arguments.output_dir:
        write_view(view, arguments.output_dir / PAGE)
        sys.stdout.write(f"\nwritten: {arguments.output_dir / PAGE}\n")


def look(arguments: argparse.Namespace) -> "GuidanceView":
    """Load both models, and decide over the tokens of the texts."""
    from vocagnolm.report.measure import view_documents
    from vocagnolm.report.view import GuidanceView, ViewSettings

    method = Method("vocagnolm", arguments.top_k, arguments.aggregation, arguments.unmapped)
    corpus, indices = _load_documents(arguments)
    pair = _load(arguments, method)
    length = pair.student_reader.limit
    competition = f"the mapped tokens of each text of up to {length:,} tokens"
    settings = ViewSettings(arguments.student, arguments.teacher, method, competition)
    views = view_documents(corpus, pair, method, indices, arguments.train_on)
    return GuidanceView(settings, tuple(views))


def _load(arguments: argparse.Namespace, guidance: Method) -> "LoadedPair":
    """Load both models: the student in float32, the teacher in `--dtype`."""
    import torch

    from vocagnolm.dist import is_on_cpu
    from vocagnolm.objective import OnlineTeacher
    from vocagnolm.report.measure import LoadedPair
    from vocagnolm.run.job import load_weights, read_models
    from vocagnolm.run.options import LoadOptions, ModelOptions, PackOptions
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
        OnlineTeacher(teachers, device),
        pair.guide.readers[0],
        device,
    )


def _load_documents(arguments: argparse.Namespace) -> tuple["datasets.Dataset", list[int]]:
    """Return the texts to show, in the column `text`, and their indices."""
    import datasets

    from vocagnolm.conventions import TEXT
    from vocagnolm.corpus import load_sample

    if arguments.text is not None:
        return datasets.Dataset.from_dict({TEXT: [arguments.text]}), [0]
    indices = arguments.document
    # The documents before one are read, and skipped.
    ((name, options),) = corpora_of(arguments)
    corpus, _ = load_sample(name, max(indices) + 1, **options)
    if not 0 <= min(indices) <= max(indices) < len(corpus):
        raise ValueError(f"--document needs indices from 0 to {len(corpus) - 1}, got {indices}")
    return corpus.select(indices), indices
