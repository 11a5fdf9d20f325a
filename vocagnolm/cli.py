"""The table of commands, the parser of their options, and how each of them ends.

A command prints one line for an error that is not its own fault, and returns an `Exit` status.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial, wraps
from importlib.metadata import version
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO

from vocagnolm.conventions import NonFiniteLoss, SharedError
from vocagnolm.doors import near, shell_door

if TYPE_CHECKING:
    import torch

# With or without the words of a command line.
_Main = Callable[..., int]

# name: (the module with `main(argv)`, one line of help)
COMMANDS = {
    "audit": ("vocagnolm.report.audit", "How well a teacher's tokens map to a student's"),
    "compare": ("vocagnolm.report.compare", "Tables and figures over finished runs"),
    "demo": ("vocagnolm.demo.main", "Train and judge students in the embedded world, on a CPU"),
    "evaluate": ("vocagnolm.evaluation.main", "Accuracy on the paper's math benchmarks"),
    "export": ("vocagnolm.run.export", "The whole student of a checkpoint, for from_pretrained"),
    "inspect": ("vocagnolm.report.inspect", "A text with its tokens kept, dropped and unmapped"),
    "prepare": ("vocagnolm.run.prepare", "The corpus of a run aligned ahead of it, without a GPU"),
    "recipes": ("vocagnolm.run.recipe", "The recipes that train --config takes by name"),
    "score": ("vocagnolm.store.score", "Write or verify a teacher-loss store"),
    "train": ("vocagnolm.run.options", "Continually pretrain a student"),
}
# Those whose work several processes share; their modules have a `check(argv)` that needs no torch.
_SHARED = ("evaluate", "score", "train")
# Options that name what may be on the hub, with its kind.
_ON_HUB: dict[str, Literal["model", "dataset"]] = {
    **dict.fromkeys(("model", "student", "teacher"), "model"),
    **dict.fromkeys(("student_tokenizer", "teacher_tokenizer"), "model"),
    **dict.fromkeys(("dataset", "eval_dataset"), "dataset"),
}


# Choices that an error lists; of more it names the nearest alone.
_MOST_CHOICES = 12


class Exit(IntEnum):
    """Exit statuses. STOPPED is EX_TEMPFAIL of sysexits.h: a scheduler may start the job again."""

    DONE = 0
    FAULTS = 1
    WRONG = 2
    BAD_NUMBERS = 3
    OUT_OF_MEMORY = 4
    STOPPED = 75
    INTERRUPTED = 130


class OneLineErrors(argparse.ArgumentParser):
    """Parser whose errors are ValueErrors, and offer the nearest known option or choice."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        if unknown:
            options = [name for name in self._option_string_actions if "-" not in name[2:]]
            message += near(re.split("[ =]", unknown)[0], options)
        if choice := re.search(r"invalid choice: '([^']+)' \(choose from (.+)\)", message):
            known = re.findall(r"[\w.-]+", choice[2])
            if len(known) > _MOST_CHOICES:
                message = message.partition(" (choose from")[0]
            message += near(choice[1], known)
        raise ValueError(message)


class Parser(OneLineErrors):
    """Parser of a command; names are never abbreviated."""

    def __init__(self, prog: str, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, allow_abbrev=False, formatter_class=layout)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Read a command line, and look for models and corpora where they are said to be.

        A command imports its own work behind this, as --help needs none.
        """
        arguments = super().parse_args(args)
        for name, value in vars(arguments).items():
            if isinstance(value, int) and value < 0:
                raise ValueError(f"--{name} must not be negative, got {value}")
        check_names(arguments)
        return arguments

    def add_dataset(
        self, *, required: bool = False, source: bool = True, several: bool = False
    ) -> None:
        """Add the options of a corpus, or of several; without `source`, all but `--dataset`."""
        add = partial(self.add_argument, nargs="+" if several else None)
        if source:
            shown = "As for vocagnolm train: files, a directory, or a hub name."
            add("--dataset", required=required, help=shown)
        add("--dataset_config", help="Configuration of a hub dataset or a directory.")
        add("--dataset_split", default="train", help="Split of a hub dataset or a directory.")
        add("--text_column", help="Column of documents; by default text, or conversations.")

    def add_dtype(self, whose: str = "") -> None:
        """Add `--dtype`, which `resolve_dtype` reads."""
        choices = ("auto", "bfloat16", "float16", "float32")
        shown = f"Precision{whose}; auto: bfloat16 on a GPU, float32 on a CPU."
        self.add_argument("--dtype", choices=choices, default="auto", help=shown)


def check_names(*options: object) -> None:
    """Reject models and corpora that are neither here nor on a hub within reach, in seconds."""
    from vocagnolm.hub import check_name

    for option, kind in _ON_HUB.items():
        for each in options:
            for name in filter(None, listed(vars(each).get(option))):
                check_name(f"--{option}", name, kind)


def listed(value: Any) -> list[Any]:
    """Return a list of what a list or a tuple holds, and of anything else a list of one."""
    return [*value] if isinstance(value, list | tuple) else [value]


def corpora_of(options: object) -> list[tuple[str, dict[str, Any]]]:
    """Return each corpus of `Parser.add_dataset` and its options, as `load_corpus` takes them.

    An option has one value for all corpora, or one for each.
    """
    given = vars(options)
    names = listed(given["dataset"])
    splits, columns, configs = (
        one_for_each(option, given[option], len(names), "corpora")
        for option in ("dataset_split", "text_column", "dataset_config")
    )
    return [
        (name, {"split": split, "text_column": column, "config_name": config})
        for name, split, column, config in zip(names, splits, columns, configs, strict=True)
    ]


def one_for_each(option: str, given: Any, count: int, of: str) -> list[Any]:
    """Return so many values of an option that has one for all, or one for each."""
    values = listed(given)
    if len(values) not in (1, count):
        raise ValueError(
            f"--{option} needs one value, or one for each of {count} {of}, got {len(values)}"
        )
    return values if len(values) > 1 else values * count


def resolve_dtype(choice: str, device: torch.device) -> str:
    """Return the dtype that `auto` stands for: bfloat16 on a GPU, float32 on a CPU."""
    best = "float32" if device.type == "cpu" else "bfloat16"
    return best if choice == "auto" else choice


def json_settings(option: str, text: str) -> dict[str, object]:
    """Read an option that is a JSON object of settings, or raise a ValueError."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: {text} is not JSON: {error}") from error
    if not (content and isinstance(content, dict)):
        raise ValueError(f"{option}: {text} is not a JSON object of settings")
    return content


def is_main() -> bool:
    """Return True in the first process of a job, before and after the processes are connected."""
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str | None, file: TextIO | None = None) -> None:
    """Print a result, once per job; nothing for None and the empty text."""
    if text and is_main():
        print(text, file=file, flush=True)


def log_main(text: str | None) -> None:
    """Print on stderr anything that is no result, once per job."""
    print_main(text, sys.stderr)


def shell(
    name: str, *, out_of_memory: str = "", resumable: bool = False
) -> Callable[[Callable[..., int | None]], _Main]:
    """Turn the expected errors of a command into one line each, and return its exit status.

    The command returns a status, or None for DONE. With advice, `out_of_memory`, that error is a
    line too. The same command resumes one that is `resumable` after an interrupt.
    """

    def begin(work: Callable[..., int | None]) -> _Main:
        @wraps(work)
        def main(argv: Sequence[str] | None = None) -> int:
            quiet_logs()
            try:
                with shell_door():
                    return work(argv) or Exit.DONE
            except NonFiniteLoss as error:
                return stop(name, error, Exit.BAD_NUMBERS)
            except (ValueError, ImportError, OSError, MemoryError) as error:
                return stop(name, error, Exit.WRONG)
            except RuntimeError as error:
                # By its name, as a command that loads no model does not load torch either.
                if not (out_of_memory and type(error).__name__ == "OutOfMemoryError"):
                    raise
                return stop(name, f"out of memory: {out_of_memory}", Exit.OUT_OF_MEMORY)
            except KeyboardInterrupt:
                again = ": give the same command again to continue" if resumable else ""
                log_main(f"{name}: interrupted{again}")
                return Exit.INTERRUPTED

        return main

    return begin


def quiet_logs() -> None:
    """Show warnings as plain lines; in a log file, progress bars only of what takes long."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():
        # tqdm reads them when it is imported.
        os.environ.setdefault("TQDM_DELAY", "5")
        os.environ.setdefault("TQDM_MININTERVAL", "30")


def stop(name: str, error: BaseException | str, status: int) -> int:
    """Print in one line what ended the command; return the status.

    Rank 0 prints an error that all processes share, another one prints only its own, with its rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Long enough for a launcher to end this process, if rank 0 has failed too.
        time.sleep(2)
        if isinstance(error, SharedError):
            return status
        name = f"{name} (rank {rank})"
    print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return status


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise a KeyboardInterrupt; leave at once within an import, which may make any error of it."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            log_main("vocagnolm: interrupted")
            os._exit(Exit.INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def run_script(main: _Main) -> NoReturn:
    """Run `main` as a process of its own, and leave without waiting for processes that are gone."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    status = main()
    is_alone = "torch" not in sys.modules or not sys.modules["torch"].distributed.is_initialized()
    # After an interrupt Python may end itself by the signal, whatever the status.
    if is_alone and status != Exit.INTERRUPTED:
        sys.exit(status)
    if status in (Exit.DONE, Exit.STOPPED):
        sys.modules["torch"].distributed.destroy_process_group()
        atexit._run_exitfuncs()  # such as those of trackers
    sys.stdout.flush()
    # Python's own end meets threads of gloo, which now and then abort it.
    os._exit(status)


@shell("vocagnolm")
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, which reads the rest of the command line itself."""
    argv = sys.argv[1:] if argv is None else argv
    lines = (f"  {name:10}{sentence}" for name, (_, sentence) in COMMANDS.items())
    parser = Parser("vocagnolm", "\n".join(("Teacher-guided continual pretraining:", *lines)))
    parser.epilog = (
        "vocagnolm COMMAND --help says more. evaluate, score and train take --accelerate_config "
        "NAME to start several processes."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('vocagnolm')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    command, rest = parser.parse_args(argv[:1]).command, argv[1:]
    # Only now, because importing the rest takes seconds.
    if command in _SHARED and any(word.startswith("--accelerate_config") for word in rest):
        from vocagnolm.launch import launch

        return launch(command, rest)
    return int(importlib.import_module(COMMANDS[command][0]).main(rest))


def start() -> NoReturn:
    """Run one command as a process of its own."""
    run_script(main)


# `accelerate launch -m vocagnolm.cli score ...`, as `--accelerate_config` does.
if __name__ == "__main__":
    from vocagnolm.cli import start as start_the_one

    start_the_one()
