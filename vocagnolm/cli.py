"""The parser of a command, and how a command ends.

A command prints one line for an error that is not its own fault, and returns an `Exit` status.
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

from vocagnolm.conventions import NonFiniteLoss, SharedError, TeacherAway
from vocagnolm.doors import near, shell_door
from vocagnolm.fields import listed
from vocagnolm.printing import log_main

# A command may be called with the words of a command line, or without any.
_Main = Callable[..., int]

# Options that name what may be on the hub, with its kind.
_ON_HUB: dict[str, Literal["model", "dataset"]] = {
    "model": "model",
    "student": "model",
    "teacher": "model",
    "student_tokenizer": "model",
    "teacher_tokenizer": "model",
    "dataset": "dataset",
    "eval_dataset": "dataset",
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
    """A parser whose errors are ValueErrors, and offer the nearest known option or choice."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        # argparse gives its errors as text alone, so names are read out of its messages. Options
        # with dashes between the words are second spellings, which are not offered.
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
    """A parser of a command; names are never abbreviated."""

    def __init__(self, prog: str, description: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, allow_abbrev=False, formatter_class=layout)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Read a command line, and look for models and corpora where they are said to be.

        Commands import their dependencies after parsing, so that --help is fast.
        """
        arguments = super().parse_args(args)
        # Every integer of these commands is a count, a size or a seed, none of which may be
        # negative, and argparse has no type for that. Only values that argparse read as int are
        # tested: an option that is a float may be negative, and a string may begin with a dash. A
        # list of integers is left to the command that takes it.
        for name, value in vars(arguments).items():
            if isinstance(value, int) and value < 0:
                raise ValueError(f"--{name} must not be negative, got {value}")
        check_names(arguments)
        return arguments

    def refuse(self, arguments: argparse.Namespace, names: str, where: str) -> None:
        """Raise a ValueError for the first of some options that was given, as it has no effect.

        An option with its default value counts as left out.
        """
        for name in names.split():
            if getattr(arguments, name) != self.get_default(name):
                raise ValueError(f"--{name} has no effect {where}: leave it out")

    def add_dataset(
        self, *, required: bool = False, source: bool = True, several: bool = False
    ) -> None:
        """Add the options of a corpus, or of several; without `source`, all but `--dataset`."""
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
    """Reject models and corpora that are neither here nor on a hub within reach, in seconds."""
    # The hub's library takes a moment to import, which --help must not wait for.
    from vocagnolm.hub import check_name

    for option, kind in _ON_HUB.items():
        for namespace in options:
            for name in listed(vars(namespace).get(option)):
                if name:
                    check_name(f"--{option}", name, kind)


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
            # Errors of other classes are faults of this project, and keep their traceback.
            try:
                with shell_door():
                    return work(argv) or Exit.DONE
            except NonFiniteLoss as error:
                return stop(name, error, Exit.BAD_NUMBERS)
            except TeacherAway as error:
                return stop(name, error, Exit.STOPPED)
            except (ValueError, ImportError, OSError, MemoryError) as error:
                return stop(name, error, Exit.WRONG)
            except RuntimeError as error:
                # The error is told by its name: a command that loads no model does not load torch.
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
        # tqdm reads them when it is imported, so they are set before a command imports it.
        os.environ.setdefault("TQDM_DELAY", "5")
        os.environ.setdefault("TQDM_MININTERVAL", "30")


def stop(name: str, error: BaseException | str, status: int) -> int:
    """Print in one line what ended the command; return the status.

    Rank 0 prints an error that all processes share. Another process prints only an error of its
    own, with its rank.
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


def _interrupt(owner: int, number: int, frame: FrameType | None) -> NoReturn:
    """Raise a KeyboardInterrupt, so that a command removes what it has not finished.

    It leaves at once in an import, which may make any error of it.
    """
    # A process that was forked has inherited the handler. Pools end theirs by SIGTERM, and would
    # wait for one that first cleans up what is not its own.
    if os.getpid() != owner:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    # The loop goes from the frame that is interrupted up to the command's own.
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            log_main("vocagnolm: interrupted")
            # Temporary directories go, as they do at Python's own end.
            weakref.finalize._exitfunc()  # type: ignore[attr-defined]
            os._exit(Exit.INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def run_script(main: _Main) -> NoReturn:
    """Run `main` as a process of its own, and end without waiting for processes that are gone."""
    numbers = [signal.SIGINT]
    # A process of several must not clean up: it could wait for others that are gone.
    if "RANK" not in os.environ:
        numbers += [signal.SIGTERM, signal.SIGHUP]
    for number in numbers:
        # A handler that another program has set, or an ignored signal, stays as it is.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, partial(_interrupt, os.getpid()))
    status = main()
    is_alone = "torch" not in sys.modules or not sys.modules["torch"].distributed.is_initialized()
    # After an interrupt Python may end itself by the signal, whatever the status.
    if is_alone and status != Exit.INTERRUPTED:
        sys.exit(status)
    # To destroy a process group waits for the other processes, which a failure may have ended. So
    # it is done only where all of them come to the same end.
    if status in (Exit.DONE, Exit.STOPPED):
        sys.modules["torch"].distributed.destroy_process_group()
        # Trackers finish their uploads there, and `os._exit` would pass them over.
        atexit._run_exitfuncs()
    sys.stdout.flush()
    # Python's own end meets threads of gloo, which now and then abort it.
    os._exit(status)


# The command is `python -m vocagnolm`; scripts of earlier versions name this module.
if __name__ == "__main__":
    runpy.run_module("vocagnolm", run_name="__main__", alter_sys=True)
