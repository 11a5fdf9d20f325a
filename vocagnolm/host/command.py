"""One shell for all commands: the parser, an error in one line, exit statuses, shared options."""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import field
from enum import IntEnum
from typing import NoReturn, TypedDict, TypeVar

import torch
from torch import distributed

from vocagnolm.conventions import NonFiniteLoss
from vocagnolm.host.processes import SharedError

DTYPES = ("auto", "bfloat16", "float16", "float32")
DATASET_OPTIONS = ("dataset", "dataset_config", "dataset_split", "text_column")
_T = TypeVar("_T")
_MAIN_FIRST_S = 1  # head start of the first process in telling an error that all have met


class Exit(IntEnum):
    """Exit statuses. STOPPED is EX_TEMPFAIL of sysexits.h: a scheduler may start the job again."""

    DONE = 0
    FAULTS = 1
    WRONG = 2
    BAD_NUMBERS = 3
    LOST = 4
    STOPPED = 75
    INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Argument parser of a command: its errors are ValueErrors, names are never abbreviated."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise ValueError(message)

    def given(self, arguments: argparse.Namespace) -> set[str]:
        """Return the names of the options that differ from their defaults."""
        return {name for name, value in vars(arguments).items() if value != self.get_default(name)}

    def add_dataset(self, *, required: bool = False, source: bool = True) -> None:
        """Add the options of a corpus.

        Args:
            required: `--dataset` must be given.
            source: add `--dataset` itself, unless a group of the caller has it.
        """
        if source:
            self.add_argument(
                "--dataset",
                required=required,
                help="As for train.py: files, a directory, or a hub name.",
            )
        self.add_argument("--dataset_config", help="Configuration of a hub dataset.")
        self.add_argument("--dataset_split", default="train", help="Split of a hub dataset.")
        self.add_argument("--text_column", default="text", help="Column that holds the text.")

    def add_dtype(
        self, *, help: str = "Precision; auto: bfloat16 on a GPU, float32 on a CPU."
    ) -> None:
        """Add `--dtype`, which `resolve_dtype` reads."""
        self.add_argument("--dtype", choices=DTYPES, default="auto", help=help)


class CorpusOptions(TypedDict):
    """Keyword arguments of `vocagnolm.corpus.load_corpus` and `load_sample`."""

    split: str
    text_column: str
    config_name: str | None


def corpus_options(arguments: argparse.Namespace) -> CorpusOptions:
    """Return the options of `Parser.add_dataset` as `load_corpus` takes them."""
    return {
        "split": arguments.dataset_split,
        "text_column": arguments.text_column,
        "config_name": arguments.dataset_config,
    }


def resolve_dtype(choice: str, device: torch.device) -> str:
    """Return the dtype that `auto` stands for: bfloat16 on a GPU, float32 on a CPU."""
    if choice != "auto":
        return choice
    return "float32" if device.type == "cpu" else "bfloat16"


def json_object(text: str) -> dict[str, object]:
    """Parse an option that is a JSON object, as `type=` of argparse."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from error
    if not (isinstance(content, dict) and content):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object of settings")
    return content


def option(default: _T, help: str) -> _T:
    """Return the field of a dataclass of options: its default, and its line in `--help`."""
    return field(default=default, metadata={"help": help})


def raise_first(faults: Iterable[str]) -> None:
    """Raise a ValueError with the first of the messages, if there is one."""
    for message in faults:
        raise ValueError(message)


def refuse_idle(given: Collection[str], idle: Collection[str], condition: str) -> None:
    """Reject options that were given and would have no effect.

    Args:
        given: as `Parser.given` returns them.
        idle: options without effect.
        condition: under which they have none, such as "with --engine vllm".
    """
    if useless := set(given) & set(idle):
        raise ValueError(f"--{min(useless)} has no effect {condition}: leave it out")


def check_at_least(arguments: argparse.Namespace, least: float, *names: str) -> None:
    """Reject numbers that are too small; an option that was not given is None."""
    for name in names:
        value = vars(arguments)[name]
        if value is not None and not value >= least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")


def is_main() -> bool:
    """Return True in the first process of a job, before and after the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str | None) -> None:
    """Print a result, once per job; nothing for None and the empty text."""
    if text and is_main():
        print(text, flush=True)


def note(text: str | None) -> None:
    """Print on stderr anything that is no result, once per job."""
    if text and is_main():
        print(text, file=sys.stderr, flush=True)


def run_command(
    name: str, work: Callable[[], int | None], *, out_of_memory: str = "", resumable: bool = False
) -> int:
    """Run a command, turn its expected errors into one line each, and return the exit status.

    Args:
        name: begins the line, such as "vocagnolm score".
        work: parses the command line and does the rest; returns a status, or None for DONE.
        out_of_memory: advice, "lower --max_length"; without it the error is a traceback.
        resumable: the same command continues after an interrupt.
    """
    quiet_logs()
    try:
        return work() or Exit.DONE
    except NonFiniteLoss as error:
        return stop(name, error, Exit.BAD_NUMBERS)
    except (ValueError, ImportError, OSError) as error:
        return stop(name, error, Exit.WRONG)
    except torch.OutOfMemoryError:
        if not out_of_memory:
            raise
        return stop(name, f"out of memory: {out_of_memory}", Exit.WRONG)
    except KeyboardInterrupt:
        again = ": give the same command again to continue" if resumable else ""
        note(f"{name}: interrupted{again}")
        return Exit.INTERRUPTED


def quiet_logs() -> None:
    """Show warnings as plain lines, and progress bars on a terminal only, not in a log file."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():
        import datasets
        from transformers.utils import logging as transformers_logging

        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def stop(name: str, error: BaseException | str, status: int) -> int:
    """Tell what ended the command in one line on stderr, and return the exit status.

    What several processes of a machine have to say is said once.
    """
    text = " ".join(str(error).split())
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(_MAIN_FIRST_S)
    if not _is_first_to_tell(text):
        return status
    if rank != "0" and not isinstance(error, SharedError):
        name = f"{name} (process {rank})"
    sys.stderr.write(f"{name}: error: {text}\n")
    sys.stderr.flush()
    if rank == "0" and distributed.is_initialized():
        # This process may host the store in which the others look whether it was told already.
        time.sleep(2 * _MAIN_FIRST_S)
    return status


def _is_first_to_tell(text: str) -> bool:
    # Wrong arguments come before any connection, and all processes were given them.
    if not distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    digest = hashlib.sha256(text.encode()).hexdigest()
    key = f"vocagnolm told {os.environ.get('GROUP_RANK', '0')} {digest}"
    try:
        return int(distributed.distributed_c10d._get_default_store().add(key, 1)) == 1
    except (RuntimeError, ValueError):  # the process that hosts the store is gone
        return True


def run_script(main: Callable[[], int]) -> NoReturn:
    """Run `main` as a process of its own, and leave without waiting for processes that are gone."""
    status, is_alone = int(Exit.LOST), True
    try:
        status = main()
        is_alone = status == Exit.LOST
    except KeyboardInterrupt:
        status = Exit.INTERRUPTED
    except SystemExit as left:  # --help, or a signal
        status = int(left.code or 0)
    if not distributed.is_initialized():
        sys.exit(status)
    if not is_alone:
        distributed.destroy_process_group()
        atexit._run_exitfuncs()  # such as those of trackers
    sys.stdout.flush()
    # Python's own end meets threads of gloo, which now and then abort it.
    os._exit(status)
