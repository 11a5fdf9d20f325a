"""The parser of a command, and how a command ends.

For an error that is not its own fault, a command prints one line and returns an `Exit` status.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import re
import runpy
import signal
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial, wraps
from types import FrameType
from typing import Literal, NoReturn

from vocagnolm.conventions import NonFiniteLoss, SharedError
from vocagnolm.doors import near, shell_door
from vocagnolm.fields import listed
from vocagnolm.shell.printing import log_main

# A command may be called with the words of a command line, or without them.
_Main = Callable[..., int]

# Options whose values may be names on the hub, with the kind of repository.
_ON_HUB: dict[str, Literal["model", "dataset"]] = {
    "model": "model",
    "student": "model",
    "teacher": "model",
    "student_tokenizer": "model",
    "teacher_tokenizer": "model",
    "dataset": "dataset",
    "eval_dataset": "dataset",
}


# Options with these endings may have an empty value: a secret that is not set, or among several
# models or corpora the revision of a directory, the configuration of a file, and the column of
# conversations.
_MAY_BE_EMPTY = ("revision", "token", "dataset_config", "text_column")
# An error lists up to this many choices. If there are more, it names only the nearest.
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
    """A parser whose errors are ValueErrors that suggest the nearest option or choice."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line, and reject an empty value, such as that of an unset variable.

        Otherwise `--output_dir "$OUT"` could mean the current directory, and `--eval_dataset
        "$HELD_OUT"` nothing at all.
        """
        option = ""
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--"):
                option, equals, value = word.partition("=")
                is_empty = bool(equals) and not value
            else:
                is_empty = not word
            if is_empty and not option.endswith(_MAY_BE_EMPTY):
                raise ValueError(f"{option or 'a word'} is empty: give a value, or leave it out")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage and exiting."""
        # argparse reports errors only as text, so the names are read from its messages. Options
        # with dashes between words are alternative spellings, and are not suggested.
        _, _, unknown = message.partition("unrecognized arguments: ")
        if unknown:
            options = [name for name in self._option_string_actions if "-" not in name[2:]]
            message += near(re.split("[ =]", unknown)[0], options)
        match = re.search(r"invalid choice: '([^']+)' \(choose from (.+)\)", message)
        if match:
            choices = re.findall(r"[\w.-]+", match[2])
            if len(choices) > _MOST_CHOICES:
                message = message.partition(" (choose from")[0]
            message += near(match[1], choices)
        raise ValueError(message)


class Parser(OneLineErrors):
    """Parser of a command. Options cannot be abbreviated."""

    def __init__(self, prog: str, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, allow_abbrev=False, formatter_class=layout)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Parse a command line, and check that models and corpora exist.

        Commands import their dependencies after parsing, so --help is fast.
        """
        arguments = super().parse_args(args)
        # Every integer of these commands is a count, a size or a seed, and none may be negative.
        # argparse has no type for that. Only values that argparse parsed as int are tested, since a
        # float may be negative, and a string may begin with a dash. The command itself checks a
        # list of integers.
        for name, value in vars(arguments).items():
            if isinstance(value, int) and value < 0:
                raise ValueError(f"--{name} must not be negative, got {value}")
        check_names(arguments)
        return arguments

    def refuse(self, arguments: argparse.Namespace, names: str, where: str) -> None:
        """Raise a ValueError for the first of these options that was given: it has no effect.

        An option with its default value counts as not given.
        """
        for name in names.split():
            if getattr(arguments, name) != self.get_default(name):
                raise ValueError(f"--{name} has no effect {where}: leave it out")

    def add_dataset(
        self, *, required: bool = False, source: bool = True, several: bool = False
    ) -> None:
        """Add the options of one or more corpora; without `source`, all but `--dataset`."""
        add = partial(self.add_argument, nargs="+" if several else None)
        if source:
            description = "A file, a directory or a hub name, as for vocagnolm train."
            add("--dataset", required=required, help=description)
        add("--dataset_config", help="Configuration of a hub dataset or a directory.")
        add("--dataset_split", default="train", help="Split to read; default: train.")
        add("--text_column", help="Column to read; default: text or conversations.")

    def add_dtype(self, whose: str = "") -> None:
        """Add `--dtype`, which `choose_dtype` reads."""
        choices = ("auto", "bfloat16", "float16", "float32")
        description = (
            f"Precision{whose}. auto: bfloat16 on a GPU and on a CPU that supports it in "
            "hardware, else float32."
        )
        self.add_argument("--dtype", choices=choices, default="auto", help=description)


def check_names(*options: object) -> None:
    """Reject models and corpora that are neither local nor on the hub, before slow work starts."""
    # Importing the hub's library takes a moment, which --help should not.
    from vocagnolm.shell.hub import check_name

    for option, kind in _ON_HUB.items():
        for namespace in options:
            for name in listed(vars(namespace).get(option)):
                if name:
                    check_name(f"--{option}", name, kind)


def shell(
    name: str, *, out_of_memory: str = "", resumable: bool = False
) -> Callable[[Callable[..., int | None]], _Main]:
    """Turn a command's expected errors into one line each, and return its exit status.

    The command returns a status, or None for DONE. If `out_of_memory` has advice, that error
    becomes a line, too. If the command is `resumable`, the message after an interrupt says that
    repeating it resumes it.
    """

    def begin(work: Callable[..., int | None]) -> _Main:
        @wraps(work)
        def main(argv: Sequence[str] | None = None) -> int:
            quiet_logs()
            # Other errors are bugs of this project and keep their traceback.
            try:
                with shell_door():
                    return work(argv) or Exit.DONE
            except NonFiniteLoss as error:
                return stop(name, error, Exit.BAD_NUMBERS)
            except (ValueError, ImportError, OSError, MemoryError) as error:
                return stop(name, error, Exit.WRONG)
            except RuntimeError as error:
                # The error is recognized by its name, because a command that loads no model does
                # not import torch.
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
    """Print warnings as plain lines. In a log file, show progress bars only for slow work."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if not sys.stderr.isatty():
        # tqdm reads these variables when it is imported, so set them before a command imports it.
        os.environ.setdefault("TQDM_DELAY", "5")
        os.environ.setdefault("TQDM_MININTERVAL", "30")


def stop(name: str, error: BaseException | str, status: int) -> int:
    """Print one line about what ended the command, and return the status.

    Rank 0 prints an error that all processes share. Other processes print only errors of their own,
    with their rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Long enough for a launcher to end this process if rank 0 has failed, too.
        time.sleep(2)
        if isinstance(error, SharedError):
            return status
        name = f"{name} (rank {rank})"
    print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return status


def _interrupt(owner: int, number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, so that a command removes its unfinished files.

    During an import it exits at once, because an import may turn the exception into any other
    error.
    """
    # A forked process has inherited the handler. Pools end their workers with SIGTERM, and would
    # wait for a worker that first cleans up what is not its own.
    if os.getpid() != owner:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    # Walk from the interrupted frame up to the command's own.
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            log_main("vocagnolm: interrupted")
            # Remove temporary directories, as Python does when it exits normally.
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            os._exit(Exit.INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def run_script(main: _Main) -> NoReturn:
    """Run `main` as a process, and exit without waiting for processes that have ended."""
    numbers = [signal.SIGINT]
    # One of several processes must not clean up: it could wait for others that have ended.
    if "RANK" not in os.environ:
        numbers += [signal.SIGTERM, signal.SIGHUP]
    for number in numbers:
        # Keep a handler that another program has set, and a signal that is ignored.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, partial(_interrupt, os.getpid()))
    status = main()
    is_alone = "torch" not in sys.modules or not sys.modules["torch"].distributed.is_initialized()
    # After an interrupt, Python may end with the signal whatever the status is.
    if is_alone and status != Exit.INTERRUPTED:
        sys.exit(status)
    # Destroying a process group waits for the other processes, which may have failed. So do it only
    # if all of them ended with the same status.
    if status in (Exit.DONE, Exit.STOPPED):
        sys.modules["torch"].distributed.destroy_process_group()
        # Trackers finish their uploads here. `os._exit` would skip that.
        atexit._run_exitfuncs()
    sys.stdout.flush()
    # When Python exits normally, gloo's threads sometimes abort it.
    os._exit(status)


# The command is `python -m vocagnolm`. Scripts of earlier versions use this module's name.
if __name__ == "__main__":
    runpy.run_module("vocagnolm", run_name="__main__", alter_sys=True)
