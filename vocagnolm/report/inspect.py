"""Show which tokens of a text would be trained, and why.

    vocagnolm inspect --text "1 + 1 = 3" --student S --teacher T
    vocagnolm inspect --dataset D --document 0 17 --student S --teacher T --output_dir DIR

The terminal shows each student token as kept, dropped or unmapped. With `--output_dir`, a page for
the browser also shows both losses and the teacher's tokens. A text that is longer than a context is
cut, and tokens are selected in each part. Exit status: 0 done, 2 a wrong argument or file, 3 a loss
is not finite.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.chat.reading import TRAIN_ON, TrainOn
from vocagnolm.cli import Parser, shell
from vocagnolm.conventions import TEXT, NonFiniteLoss
from vocagnolm.fields import OptionError, corpora_of, in_range, listed, options_of
from vocagnolm.method import Method
from vocagnolm.record import check_output_directory, output_directory
from vocagnolm.report.view import GuidanceView, TextView, view_tokens
from vocagnolm.shell.io import write_text
from vocagnolm.training.options import GuidanceOptions, LoadOptions, ModelOptions, PackOptions

if TYPE_CHECKING:
    import datasets
    from torch import nn

    from vocagnolm.collator import Batch
    from vocagnolm.guidance import TokenGuidance
    from vocagnolm.objective import Objective
    from vocagnolm.readers import Reader

PAGE = "guidance.html"


def _parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("vocagnolm inspect", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", help="Text to show.")
    corpus_help = "A file, a directory or a hub name, as for train."
    add("--dataset", group=source, hub="dataset", help=corpus_help)
    # A text on the command line is a document by itself.
    of_dataset: dict[str, Any] = {"needs": ["dataset"]}
    indices = "Documents to show, counted from 0; default: 0."
    add("--document", type=int, nargs="+", default=[0], metavar="INDEX", help=indices, **of_dataset)
    parser.add_dataset(source=False)
    parser.add_options(PackOptions, "student_chat_template", **of_dataset)
    parser.add_options(PackOptions, "teacher_chat_template", nargs=1, **of_dataset)
    parser.add_options(PackOptions, "train_on", default=TRAIN_ON[0], **of_dataset)
    model_help = "Causal LM: a hub name or a directory."
    add("--student", required=True, hub="model", help=model_help)
    parser.add_options(LoadOptions, "student_revision student_tokenizer")
    # With one teacher these values are lists, as those of several teachers are in vocagnolm train.
    add("--teacher", nargs=1, required=True, hub="model", help=model_help)
    parser.add_options(LoadOptions, "teacher_revision teacher_tokenizer", nargs=1)
    parser.add_dtype(" of the teacher (the student's is float32)")
    parser.add_options(LoadOptions, "attn_implementation trust_remote_code")
    add("--max_length", type=int, help="Student tokens per part; default: 2048 or its context.")
    # The view compares with a teacher, which the other selections do not have.
    parser.add_options(Method, "selection", choices=["top_k", "accept"])
    parser.add_options(Method, "top_k aggregation unmapped")
    add("--output_dir", type=Path, help=f"For {PAGE}.")
    arguments = parser.parse_args(argv)
    in_range(arguments, "[0, inf)", "document")
    return arguments


@shell("vocagnolm inspect", out_of_memory="lower --max_length")
def main(argv: Sequence[str] | None = None) -> None:
    """Show texts."""
    arguments = _parse(argv)
    from vocagnolm.report.render import render_html, render_text

    # Check the directory before anything is loaded.
    if arguments.output_dir:
        check_output_directory(arguments.output_dir, PAGE, listed(arguments.dataset or []))
    view = build_view(arguments)
    sys.stdout.write(render_text(view))
    if arguments.output_dir:
        with output_directory(arguments.output_dir, PAGE):
            write_text(arguments.output_dir / PAGE, render_html(view))
        sys.stdout.write(f"\nwritten: {arguments.output_dir / PAGE}\n")


def build_view(arguments: argparse.Namespace) -> GuidanceView:
    """Load both models as a training run does, and choose among the tokens of texts."""
    import torch

    from vocagnolm.objective import Objective, OnlineTeacher
    from vocagnolm.shell.dist import is_on_cpu
    from vocagnolm.token_loss import add_token_losses
    from vocagnolm.training.models import load_weights, read_models

    # A text beyond a context is cut, unless --max_length asks for more than a model can read.
    shorten = arguments.max_length is None
    # Options that this command does not have, or that are not given, keep their defaults.
    values = {name: value for name, value in vars(arguments).items() if value is not None}
    values["teacher_dtype"] = arguments.dtype
    names = {declared.name for declared in options_of(GuidanceOptions)} & values.keys()
    options = GuidanceOptions(**{name: values[name] for name in names})
    model_options = ModelOptions(student=arguments.student, teacher=arguments.teacher)
    corpus, indices = _read_documents(arguments)
    device = torch.device("cpu") if is_on_cpu() else torch.accelerator.current_accelerator()
    assert device is not None
    models = read_models(model_options, options, device, shorten=shorten)
    student, teachers = load_weights(models, model_options, device)
    assert models.teacher_readers
    assert isinstance(teachers, list)
    student = add_token_losses(student.to(device).train(False))
    objective = Objective(options.guidance, OnlineTeacher(teachers, device))
    readers = models.student_reader, models.teacher_readers.readers[0]
    texts = view_documents(corpus, readers, student, objective, indices, arguments.train_on)
    return GuidanceView(arguments.student, arguments.teacher[0], options.guidance, tuple(texts))


def _read_documents(arguments: argparse.Namespace) -> tuple[datasets.Dataset, list[int]]:
    """Read the documents to show, and their indices in the corpus."""
    import datasets

    from vocagnolm.corpus import load_sample

    if arguments.text is not None:
        return datasets.Dataset.from_dict({TEXT: [arguments.text]}), [0]
    indices: list[int] = arguments.document
    ((name, corpus_options),) = corpora_of(arguments)
    # This also reads the documents before the last one.
    corpus, _ = load_sample(name, max(indices) + 1, **corpus_options)
    if max(indices) >= len(corpus):
        raise OptionError("document", f"must be below {len(corpus):,}, got {max(indices)}")
    return corpus.select(indices), indices


def view_documents(
    corpus: datasets.Dataset,
    readers: tuple[Reader, Reader],
    student: nn.Module,
    objective: Objective,
    indices: Sequence[int],
    train_on: TrainOn = "completions",
) -> list[TextView]:
    """Show all segments of documents, each as its own sequence; `indices` are for messages."""
    from accelerate.utils import send_to_device

    from vocagnolm.collator import PackedCollator
    from vocagnolm.data import align_corpus
    from vocagnolm.packing import as_block

    # The batch is made as in training, so the page shows what training would do.
    segments = align_corpus(corpus, *readers, train_on=train_on)
    for number, reason in segments.skipped:
        # One of several documents may be skipped, but not all.
        message = f"document {indices[number]} cannot be shown ({reason})"
        if not len(segments.rows):
            raise ValueError(f"{message}: give another text")
        logging.getLogger(__name__).warning(message)
    arrays = segments.rows.with_format("numpy")
    device = next(student.parameters()).device
    views = []
    # Each segment is its own batch, so tokens compete only within it.
    for number, segment in enumerate(segments.rows):
        collate = PackedCollator(
            segment["student_tokens"],
            teacher_max_length=readers[1].limit,
            shares=objective.method.aggregation_in_effect == "share",
        )
        # The collator reads blocks of arrays, and `view_tokens` reads the row as plain Python.
        batch = send_to_device(collate([as_block(number, arrays[number : number + 1])]), device)
        guidance = measure(student, objective, batch)
        document, start = segment["document"], segment["start"]
        text = corpus[document]["text"][start : segment["end"]]
        tokens = view_tokens(segment, text, readers[0].tokenizer, batch, guidance)
        views.append(TextView(text, indices[document], start, tuple(tokens)))
    return views


def measure(student: nn.Module, objective: Objective, batch: Batch) -> TokenGuidance:
    """Choose among the tokens of a batch, as in training but without a step."""
    import torch

    from vocagnolm.collator import student_segments

    with torch.no_grad():
        teacher = objective.teacher_losses(batch)
        assert teacher is not None, f"{objective.method.as_typed} asks no teacher"
        inputs = {name: batch[name] for name in ("input_ids", "position_ids", "labels")}
        loss_BS = student(**inputs, segments=student_segments(batch), token_losses=True)
        for role, losses in (("student", loss_BS), ("teacher", teacher.loss_BT)):
            if not losses.isfinite().all():
                raise NonFiniteLoss(f"the {role}'s losses are NaN or infinite on this text")
        return objective.select(loss_BS, batch, teacher)
