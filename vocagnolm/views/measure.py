"""Show a text with its tokens kept, dropped and unmapped, and why.

    vocagnolm inspect --text "1 + 1 = 3" --student S --teacher T
    vocagnolm inspect --text_file page.txt --student S --teacher T --table
    vocagnolm inspect --dataset D --documents 3 --student S --teacher T --output_dir DIR

Every token of the student is marked in the terminal, with `--table` listed with both losses and the
teacher's pieces; `--output_dir` gets a page for the browser and the numbers. A text that exceeds a
context is cut, and the tokens of each part compete by themselves. Exit status: 0 done, 2 a wrong
argument or file, 3 losses that are not finite.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import datasets
import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from vocagnolm.collator import Batch, PackedCollator, student_segments
from vocagnolm.conventions import IGNORED_LABEL, NonFiniteLoss
from vocagnolm.corpus import TEXT, load_sample
from vocagnolm.data import align_corpus
from vocagnolm.guidance import (
    AGGREGATIONS,
    UNMAPPED_STRATEGIES,
    Guidance,
    TokenGuidance,
    aggregate_teacher_losses,
    select_tokens,
)
from vocagnolm.host.files import check_writable
from vocagnolm.host.processes import is_on_cpu
from vocagnolm.models import source as models
from vocagnolm.packing import Block
from vocagnolm.teacher import ResidentTeacher
from vocagnolm.token_loss import add_token_losses
from vocagnolm.tokenizers import Reader, load_tokenizer, student_reader, teacher_reader
from vocagnolm.views.page import render_table, render_text, write_view
from vocagnolm.views.view import GuidanceView, TextView, ViewSettings, read_segment, view_rows

NAME = "guidance"  # of the files in --output_dir
DEFAULT_LENGTH = 2048  # the paper's
_OF_DATASETS = ("dataset_config", "dataset_split", "text_column", "documents", "document")


class _OneLineErrors(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _OneLineErrors(
        prog="vocagnolm inspect",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="The text itself.")
    source.add_argument("--text_file", type=Path, help="A file that is one text, in UTF-8.")
    source.add_argument("--dataset", help="As for train.py: files, a directory, or a hub name.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--documents", type=int, help="How many of --dataset; default: 1.")
    which.add_argument("--document", type=int, help="The number of a single one, from 0.")
    add("--dataset_config", help="Configuration of a hub dataset.")
    add("--dataset_split", default="train", help="Split of a hub dataset.")
    add("--text_column", default=TEXT, help="Column that holds the text.")
    for role in ("student", "teacher"):
        add(f"--{role}", required=True, help="Causal LM: a hub name or a directory.")
        add(f"--{role}_revision", help="Branch, tag or commit on the hub.")
        add(f"--{role}_tokenizer", help="Its tokenizer, if it is not with its weights.")
    dtypes = ("auto", "bfloat16", "float16", "float32")
    add("--dtype", choices=dtypes, default="auto", help="Of the teacher; the student: float32.")
    add("--attn_implementation", help="As in transformers.")
    add("--trust_remote_code", action="store_true")
    add("--max_length", type=int, help="Student tokens of a part; default: 2048 or its context.")
    add("--top_k", type=float, default=0.4, help="Share of the mapped tokens kept, Eq. 4.")
    add("--aggregation", choices=AGGREGATIONS, default="max", help="Eq. 2.")
    add("--unmapped", choices=UNMAPPED_STRATEGIES, default="include", help="Section 6.2.")
    add("--table", action="store_true", help="List all tokens with losses and pieces.")
    add("--color", choices=("auto", "always", "never"), default="auto")
    add("--output_dir", type=Path, help=f"Gets {NAME}.html and {NAME}.json.")
    arguments = parser.parse_args(argv)
    _check(arguments, parser)
    return arguments


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what is out of range, and options that would have no effect."""
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    if not arguments.dataset and (useless := given & set(_OF_DATASETS)):
        raise ValueError(f"--{min(useless)} has no effect without --dataset: leave it out")
    for name, least in (("documents", 1), ("document", 0), ("max_length", 4)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Show texts, and return the exit status."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        _inspect(parse(argv))
    except (ValueError, ImportError, OSError) as error:
        return _stop(error, 2)
    except NonFiniteLoss as error:
        return _stop(error, 3)
    except torch.OutOfMemoryError:
        return _stop(ValueError("out of memory: lower --max_length"), 2)
    return 0


def _stop(error: Exception, status: int) -> int:
    sys.stderr.write(f"vocagnolm inspect: error: {' '.join(str(error).split())}\n")
    return status


def _inspect(arguments: argparse.Namespace) -> None:
    guidance = Guidance(arguments.top_k, arguments.aggregation, arguments.unmapped)
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    pair = load_pair(arguments)
    length = pair.student_reader.limit
    corpus, first = load_documents(arguments)
    view = GuidanceView(
        ViewSettings(
            student=arguments.student,
            teacher=arguments.teacher,
            method="vocagnolm",
            top_k=guidance.top_k,
            aggregation=guidance.aggregation,
            unmapped=guidance.unmapped,
            competition=f"the mapped tokens of each text of up to {length:,} tokens",
        ),
        tuple(view_documents(corpus, pair, guidance, first)),
    )
    if arguments.output_dir:
        write_view(view, arguments.output_dir, NAME)
    sys.stdout.write(render_text(view, color=_has_color(arguments.color)))
    if arguments.table:
        sys.stdout.write("\n" + render_table(view))
    if arguments.output_dir:
        sys.stdout.write(f"\nwritten: {arguments.output_dir / NAME}.html, {NAME}.json\n")


def _has_color(choice: str) -> bool:
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


# -- Texts and models ------------------------------------------------------------------------


def load_documents(arguments: argparse.Namespace) -> tuple[datasets.Dataset, int]:
    """The texts to show, in the column `text`, and the number of the first."""
    if arguments.dataset:
        number = arguments.document
        corpus, _ = load_sample(
            arguments.dataset,
            (arguments.documents or 1) if number is None else number + 1,
            split=arguments.dataset_split,
            text_column=arguments.text_column,
            config_name=arguments.dataset_config,
        )
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
        try:
            text = arguments.text_file.read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"--text_file {arguments.text_file} is not UTF-8: {error}") from error
    return datasets.Dataset.from_dict({TEXT: [text]}), 0


@dataclass(frozen=True)
class Pair:
    """Both models, ready to score, and how they read."""

    student: PreTrainedModel
    student_reader: Reader
    teacher: ResidentTeacher
    teacher_reader: Reader
    device: torch.device


def load_pair(arguments: argparse.Namespace) -> Pair:
    """Load both models: the student in float32, the teacher in `--dtype`.

    Raises:
        ValueError: one cannot be loaded, or they do not go together.
    """
    student, student_tokenizer, student_context = _find(arguments, "student")
    teacher, teacher_tokenizer, teacher_context = _find(arguments, "teacher")
    length = arguments.max_length or min(DEFAULT_LENGTH, student_context)
    if length > student_context:
        raise ValueError(
            f"--max_length {length} exceeds the student's context of {student_context}"
        )
    device = torch.device("cpu") if is_on_cpu() else torch.accelerator.current_accelerator()
    assert device is not None
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16"
    learner, guide = student.load(torch.float32), teacher.load(getattr(torch, dtype))
    models.check_distinct(learner, guide, student_tokenizer, teacher_tokenizer)
    learner.to(device)  # type: ignore[arg-type]  # its decorator hides that it is a method
    return Pair(
        add_token_losses(learner.train(False)),
        student_reader(student_tokenizer, length),
        ResidentTeacher([guide], device),
        teacher_reader(teacher_tokenizer, teacher_context),
        device,
    )


def _find(arguments: argparse.Namespace, role: models.Role) -> tuple[models.ModelSource, Any, int]:
    """A model before its weights are read, its tokenizer, and its context in tokens."""
    options = vars(arguments)
    source = models.ModelSource(
        options[role],
        role,
        options[f"{role}_revision"],
        arguments.attn_implementation,
        arguments.trust_remote_code,
    )
    config = source.config()
    elsewhere = options[f"{role}_tokenizer"]
    tokenizer = load_tokenizer(
        elsewhere or source.name,
        role,
        revision=None if elsewhere else source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    models.check_vocabulary(config, tokenizer, role)
    return source, tokenizer, models.context_length(config)


# -- Measuring -------------------------------------------------------------------------------


def view_documents(
    corpus: datasets.Dataset, pair: Pair, guidance: Guidance, first: int = 0
) -> list[TextView]:
    """The views of all segments of some documents, each of which is a sequence of its own.

    Args:
        corpus: the documents, in the column `text`.
        pair: both models.
        guidance: how tokens are chosen.
        first: number of the first document.

    Raises:
        ValueError: no document can be shown.
        NonFiniteLoss: losses are NaN or infinite.
    """
    segments = align_corpus(corpus, pair.student_reader, pair.teacher_reader)
    for number, reason in segments.skipped:
        message = f"document {first + number} cannot be shown: {reason}"
        if not len(segments.rows):
            raise ValueError(f"{message}; give another text")
        logging.getLogger(__name__).warning(message)
    arrays = segments.rows.with_format("numpy")
    views: list[TextView] = []
    for number, row in enumerate(segments.rows):
        collate = PackedCollator(
            row["student_tokens"], teacher_max_length=pair.teacher_reader.limit
        )
        block = cast(Block, {"block": number, **arrays[number : number + 1]})
        moved = {
            name: value.to(pair.device) if isinstance(value, torch.Tensor) else value
            for name, value in collate([block]).items()
        }
        batch = cast(Batch, moved)
        document = corpus[row["document"]][TEXT]
        segment = read_segment(row, document, pair.student_reader, pair.teacher_reader)
        segment = replace(segment, document=first + segment.document)
        views += view_rows(batch, measure(batch, pair, guidance), [[segment]])
    return views


@torch.no_grad()
def measure(batch: Batch, pair: Pair, guidance: Guidance) -> TokenGuidance:
    """What decides over the tokens of a batch, as in training but without a step.

    Raises:
        NonFiniteLoss: losses are NaN or infinite.
    """
    student: Any = pair.student
    loss_BT, valid_BT = pair.teacher.losses(batch)
    teacher_BS, mapped_BS = aggregate_teacher_losses(
        loss_BT, batch["teacher_ranges"], guidance.aggregation, valid_BT
    )
    student_BS = student(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        labels=batch["labels"],
        segments=student_segments(batch),
        token_losses=True,
    )
    for role, losses in (("student", student_BS), ("teacher", loss_BT)):
        if not losses.isfinite().all():
            raise NonFiniteLoss(f"the {role}'s losses are NaN or infinite on this text")
    valid_BS = batch["labels"] != IGNORED_LABEL
    weight_BS = select_tokens(
        student_BS,
        teacher_BS,
        valid_BS,
        mapped_BS,
        top_k=guidance.top_k,
        unmapped=guidance.unmapped,
        scope=guidance.scope,
    )
    return TokenGuidance(student_BS, teacher_BS, valid_BS, mapped_BS, weight_BS, loss_BT)
