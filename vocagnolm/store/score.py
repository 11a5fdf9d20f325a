"""Score a corpus with a teacher, once, for any student: writes a teacher-loss store.

    vocagnolm score --teacher T --dataset D --output_dir S
    accelerate launch -m vocagnolm.cli score --teacher T --dataset D --output_dir S
    vocagnolm score --verify S         # compare every byte with the checksums
    vocagnolm score --verify S --dataset D    # and look for every document
    vocagnolm score --repair --teacher T --dataset D --output_dir S    # score again what is bad

Killed at any moment, the same command goes on at the shards that are not written. Any number of
processes may share the work. Exit status: 0 done, 1 faults found, 2 a wrong argument or file, 3
losses that are not finite, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import datasets
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.corpus import TEXT, load_corpus, unusable, values
from vocagnolm.data import Reader, teacher_reader
from vocagnolm.host.files import write_json
from vocagnolm.host.manifest import MANIFEST_FILE, find_faults
from vocagnolm.host.processes import LONGEST_WAIT, SharedError, in_agreement, is_on_cpu
from vocagnolm.host.versions import versions
from vocagnolm.models import source as models
from vocagnolm.models.identity import revision_of
from vocagnolm.store import store
from vocagnolm.store.job import (
    PACKAGES,
    PLAN_FILE,
    Job,
    check_corpus,
    check_plan,
    run,
    tidy,
)
from vocagnolm.store.windows import HFScorer, Scorer
from vocagnolm.tokenizers import load_tokenizer, tokenizer_sha256

MIN_CONTEXT = 512  # by default, in a context that has room for it
LONGEST_CONTEXT = 4096  # by default: activations of longer ones are large


_DATASET = ("dataset", "dataset_config", "dataset_split", "text_column")
_SHOWN = 10  # documents that are missing, of how many there may be


class _OneLineErrors(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = _OneLineErrors(
        prog="vocagnolm score",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--teacher", help="Causal LM that scores: a hub name or a directory.")
    add("--teacher_revision", help="Branch, tag or commit on the hub.")
    add("--teacher_tokenizer", help="Its tokenizer, if it is not with its weights.")
    add("--dataset", help="As for train.py: files, a directory, or a hub name.")
    add("--dataset_config", help="Configuration of a hub dataset.")
    add("--dataset_split", default="train", help="Split of a hub dataset.")
    add("--text_column", default=TEXT, help="Column that holds the text.")
    add("--output_dir", type=Path, help="The store.")
    add("--context", type=int, help="Most tokens that the teacher reads at once; default: all.")
    add("--min_context", type=int, help="Before any token of a longer document; default: 512.")
    add("--shard_documents", type=int, default=1000, help="Documents per shard.")
    add("--batch_tokens", type=int, default=16384, help="Tokens of a forward pass.")
    add("--loss_dtype", choices=("float16", "float32"), default="float16", help="In the store.")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto")
    add("--quantization", type=_json_object, help="JSON: a quantization config of transformers.")
    add("--engine", choices=("hf", "vllm"), default="hf")
    add("--attn_implementation", help="As in transformers. hf only.")
    add("--trust_remote_code", action="store_true")
    add("--verify", type=Path, metavar="STORE", help="Compare a store with its checksums.")
    add("--repair", action="store_true", help="Verify --output_dir first, and score what is bad.")
    arguments = parser.parse_args(argv)
    _check(arguments, parser)
    return arguments


def _json_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not (isinstance(content, dict) and content):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object of settings")
    return content


def _check(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse what is missing, and options that would have no effect."""
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    if arguments.verify:
        has_effect = {"verify", *_DATASET} if arguments.dataset else {"verify"}
        if useless := given - has_effect:
            raise ValueError(f"--{min(useless)} has no effect with --verify: leave it out")
        return
    for name in ("teacher", "dataset", "output_dir"):
        if not getattr(arguments, name):
            raise ValueError(f"--{name} is required, unless a store is to be checked with --verify")
    if arguments.engine == "vllm" and (
        useless := given & {"attn_implementation", "quantization", "batch_tokens"}
    ):
        raise ValueError(f"--{min(useless)} has no effect with --engine vllm: leave it out")
    for name in ("shard_documents", "batch_tokens", "min_context", "context"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Score, verify or repair, and return the exit status."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("vocagnolm").setLevel(logging.INFO)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        arguments = parse(argv)
        return verify(arguments) if arguments.verify else score(arguments)
    except (ValueError, ImportError, OSError) as error:
        return _stop(error, 2)
    except NonFiniteLoss as error:
        return _stop(error, 3)
    except torch.OutOfMemoryError:
        return _stop(ValueError("out of memory: lower --batch_tokens, --context or --dtype"), 2)
    except KeyboardInterrupt:
        say("vocagnolm score: interrupted: give the same command again to continue")
        return 130
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _stop(error: Exception, status: int) -> int:
    if not isinstance(error, SharedError) or PartialState().is_main_process:
        say(f"vocagnolm score: error: {' '.join(str(error).split())}")
    return status


def say(text: str) -> None:
    """Print what is no result."""
    print(text, file=sys.stderr, flush=True)


def verify(arguments: argparse.Namespace) -> int:
    """Say what is wrong with a store."""
    directory: Path = arguments.verify
    opened = store.Store(directory)
    manifest = opened.manifest
    faults = dict(sorted(find_faults(directory, manifest["shards"])))
    for file, fault in faults.items():
        print(f"{directory / file} {fault}")
    if faults:
        print(
            f"{len(faults)} of {len(manifest['shards'])} shards are bad: {store.remedy(manifest)}"
        )
        return 1
    if arguments.dataset and (missing := find_missing(opened, load_documents(arguments))):
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if missing[_SHOWN:] else "")
        print(
            f"{len(missing):,} documents of {arguments.dataset} are not in {directory}, or have "
            f"another text there (numbers from 0: {shown}): score this corpus into another "
            "directory, or train without them with --missing_losses skip"
        )
        return 1
    print(f"{directory}: {len(manifest['shards'])} shards, {manifest['tokens']:,} tokens, all good")
    return 0


def find_missing(opened: store.Store, corpus: datasets.Dataset) -> list[int]:
    """Numbers of the usable documents of a corpus that a store does not have."""
    missing = []
    for first in range(0, len(corpus), 1000):
        part = corpus.with_format("arrow")[first : first + 1000]
        for number, text in enumerate(values(part[TEXT]), first):
            if not unusable(text) and opened.segments(text) is None:
                missing.append(number)
    return missing


def load_documents(arguments: argparse.Namespace) -> datasets.Dataset:
    """The corpus."""
    return load_corpus(
        arguments.dataset,
        split=arguments.dataset_split,
        text_column=arguments.text_column,
        config_name=arguments.dataset_config,
    )


def score(arguments: argparse.Namespace) -> int:
    """Score a corpus."""
    state = PartialState(cpu=is_on_cpu(), timeout=LONGEST_WAIT)
    directory: Path = arguments.output_dir
    with in_agreement():
        source = models.ModelSource(
            arguments.teacher,
            "teacher",
            arguments.teacher_revision,
            arguments.attn_implementation,
            arguments.trust_remote_code,
        )
        config = source.config()
        reader = load_reader(arguments, source, config)
        corpus = load_documents(arguments)
        plan = describe(arguments, config, reader, len(corpus))
    job = Job(
        directory,
        corpus,
        reader,
        arguments.min_context,
        arguments.shard_documents,
        arguments.loss_dtype,
    )
    with in_agreement():
        found = [state.is_main_process and prepare(job, plan, arguments.repair)]
    if all(broadcast_object_list(found)):
        return 0
    with in_agreement():
        scorer = load_scorer(arguments, source, reader, state)
    with in_agreement():
        if state.is_main_process:
            begin(directory, plan)
    run(job, scorer, plan | {"versions": versions(PACKAGES)}, state)
    if state.is_main_process:
        print(f"{directory}: {store.manifest_of(directory)['tokens']:,} tokens")
    return 0


def prepare(job: Job, plan: dict[str, Any], repair: bool) -> bool:
    """See what is there, and open a bad store again.

    Returns:
        Whether the store is finished.

    Raises:
        ValueError: the directory cannot be written, or holds another store.
    """
    directory = job.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output_dir {directory} cannot be made ({error.strerror}): give another directory"
        ) from error
    if not os.access(directory, os.W_OK):
        raise ValueError(f"--output_dir {directory} cannot be written: give another directory")
    check_plan(directory, plan)
    if not (directory / MANIFEST_FILE).exists():
        return False
    manifest = store.manifest_of(directory)
    check_corpus(job, manifest)
    faults = dict(sorted(find_faults(directory, manifest["shards"]))) if repair else {}
    if faults:
        print(f"to be scored again: {', '.join(faults)}", flush=True)
        begin(directory, plan)  # first, so that a kill leaves no shards without a plan
        store.reopen(directory, list(faults))
        return False
    tidy(directory)
    print(f"{directory} is finished: nothing to do")
    return True


def begin(directory: Path, plan: dict[str, Any]) -> None:
    """Take a directory for a store, unless another job has just taken it for another one."""
    write_json(directory / PLAN_FILE, plan, replace=False)
    check_plan(directory, plan)


def load_reader(
    arguments: argparse.Namespace, source: models.ModelSource, config: PreTrainedConfig
) -> Reader:
    """How the teacher reads."""
    tokenizer = load_tokenizer(
        arguments.teacher_tokenizer or source.name,
        "teacher",
        revision=None if arguments.teacher_tokenizer else source.revision,
        trust_remote_code=source.trust_remote_code,
    )
    models.check_vocabulary(config, tokenizer, "teacher")
    limit = models.context_length(config)
    if arguments.engine == "vllm":
        limit -= 1  # it generates one token behind every window
    context = arguments.context or min(limit, LONGEST_CONTEXT)
    if context > limit:
        raise ValueError(
            f"--context {context} exceeds the teacher's context of {limit}: lower it to that"
        )
    if arguments.min_context is None:
        arguments.min_context = min(MIN_CONTEXT, context // 4)
    if arguments.min_context > context - 2:
        raise ValueError(
            f"--min_context {arguments.min_context} leaves no room in a context of {context}: "
            f"lower it to at most {context - 2}"
        )
    return teacher_reader(tokenizer, context)


def describe(
    arguments: argparse.Namespace, config: PreTrainedConfig, reader: Reader, documents: int
) -> dict[str, Any]:
    """What decides the content of a store."""
    return {
        "teacher": arguments.teacher,
        "teacher_revision": revision_of(arguments.teacher, config),
        "tokenizer_sha256": tokenizer_sha256(reader.tokenizer),
        "special_tokens": {"before": reader.start, "behind": None},
        "segmentation": "windows of whole documents",
        "context": reader.limit,
        "min_context": arguments.min_context,
        "engine": arguments.engine,
        "dtype": dtype(arguments),
        "quantization": arguments.quantization,
        "loss_dtype": arguments.loss_dtype,
        "dataset": arguments.dataset,
        "dataset_documents": documents,
        "shard_documents": arguments.shard_documents,
    }


def dtype(arguments: argparse.Namespace) -> str:
    """The type that `--dtype auto` means: bfloat16 on a GPU, float32 on a CPU."""
    if arguments.dtype != "auto":
        return str(arguments.dtype)
    return "bfloat16" if torch.cuda.is_available() else "float32"


def load_scorer(
    arguments: argparse.Namespace, source: models.ModelSource, reader: Reader, state: Any
) -> Scorer:
    """The teacher, ready to score, on this process's device."""
    if arguments.engine == "vllm":
        from vocagnolm.store.vllm import VLLMScorer

        if state.num_processes > 1:
            raise ValueError("--engine vllm spreads a model over the GPUs itself: start it alone")
        return VLLMScorer(
            source.name, reader.limit, dtype(arguments), source.revision, source.trust_remote_code
        )
    model = source.load(getattr(torch, dtype(arguments)), arguments.quantization, state.device)
    if not arguments.quantization:
        model.to(state.device)
    return HFScorer(model, arguments.batch_tokens)
