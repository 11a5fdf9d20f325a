"""The parser of a command, and how a command ends.

For an error that is not its own fault, a command prints one line and returns an `Exit` status.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial, wraps
from types import FrameType
from typing import Any, Literal, NoReturn, get_args, get_origin

from vocagnolm.conventions import NonFiniteLoss, SharedError
from vocagnolm.fields import (
    Kind,
    Option,
    OptionError,
    at_shell,
    check_not_empty,
    kinds_of,
    listed,
    named,
    options_of,
    suggestion,
    without_effect,
)
from vocagnolm.shell.io import log_main

# A command may be called with the words of a command line, or without them.
_Main = Callable[..., int]


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
    """A parser whose errors are ValueErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise an error instead of printing the usage and exiting."""
        raise ValueError(message)


class Parser(OneLineErrors):
    """Parser of a command. Options cannot be abbreviated.

    Attributes:
        options: what is declared of its options, by name.
    """

    def __init__(self, prog: str, description: str | None) -> None:
        self.options: dict[str, Option] = {}
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, allow_abbrev=False, formatter_class=layout)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None
    ) -> argparse.Namespace:
        """Parse a command line, and check values that argparse does not.

        Commands import their dependencies after parsing, so --help is fast.
        """
        arguments, unknown = self.parse_known_args(args)
        if unknown:
            known = [f"--{name}" for name in self.options]
            name = unknown[0].partition("=")[0]
            raise ValueError(f"unknown option {unknown[0]}{suggestion(name, known)}")
        values = vars(arguments)
        # Every integer of these commands is a count, a size or a seed, and none may be negative.
        # argparse has no type for that. Only values that argparse parsed as int are tested, since a
        # float may be negative, and a string may begin with a dash. The command itself checks a
        # list of integers.
        for name, value in values.items():
            if isinstance(value, int) and value < 0:
                raise OptionError(name, f"must not be negative, got {value}")
        for name, declared in self.options.items():
            value = values.get(name)
            if not declared.may_be_empty:
                check_not_empty(name, value)
            for other in declared.excludes:
                if values[other] and value not in (None, declared.default):
                    raise OptionError(name, f"and {named(other)} cannot be combined: give one")
        for name, fault in without_effect(values, self.options.values()):
            raise OptionError(name, f"has no effect {fault}: leave it out")
        check_hub_names(values, self.options)
        return arguments

    def add_argument(
        self,
        *names: str,
        group: Any = None,
        hub: Kind | None = None,
        needs: Sequence[str] = (),
        excludes: Sequence[str] = (),
        may_be_empty: bool = False,
        **settings: Any,
    ) -> argparse.Action:
        """Add an option, perhaps to a group, with what `Option` says of it."""
        add = group.add_argument if group else super().add_argument
        action: argparse.Action = add(*names, **settings)
        self.options[action.dest] = Option(
            action.dest,
            action.default,
            hub=hub,
            needs=needs,
            excludes=excludes,
            may_be_empty=may_be_empty,
        )
        return action

    def add_options(self, kind: type, names: str, **settings: Any) -> None:
        """Add some of the options that a dataclass declares. `settings` replace what it says."""
        for declared in options_of(kind):
            if declared.name in names.split():
                value_kind, is_list = kinds_of(kind)[declared.name]
                of_argparse = _settings_of_argparse(declared, value_kind, is_list)
                of_argparse |= {"default": declared.default, "hub": declared.hub}
                self.add_argument(f"--{declared.name}", **(of_argparse | settings))

    def add_dataset(
        self, *, required: bool = False, source: bool = True, several: bool = False
    ) -> None:
        """Add the options of one or more corpora; without `source`, all but `--dataset`."""
        add = partial(self.add_argument, nargs="+" if several else None)
        if source:
            description = "A file, a directory or a hub name, as for vocagnolm train."
            add("--dataset", required=required, hub="dataset", help=description)
        add = partial(add, needs=["dataset"], may_be_empty=True)
        add("--dataset_config", help="Configuration of a hub dataset or a directory.")
        add("--dataset_split", default="train", help="Split to read; default: train.")
        add("--text_column", help="Column to read; default: text or conversations.")

    def add_dtype(self, whose: str = "", **declaration: Any) -> None:
        """Add `--dtype`, which `choose_dtype` reads."""
        choices = ("auto", "bfloat16", "float16", "float32")
        description = (
            f"Precision{whose}. auto: bfloat16 on a GPU and on a CPU that supports it in "
            "hardware, else float32."
        )
        self.add_argument(
            "--dtype", choices=choices, default="auto", help=description, **declaration
        )


class OptionsParser(OneLineErrors):
    """A parser of dataclasses of options. Its result has only the options that are given.

    Attributes:
        options: what is declared, by name and alias.
        first: the group at the top of the help.
    """

    def __init__(self, prog: str, description: str, usage: str, epilog: str) -> None:
        self.options: dict[str, Option] = {}
        super().__init__(
            prog,
            usage,
            description,
            epilog,
            formatter_class=_Help,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self.first = self.add_argument_group("most used")

    def add_options(self, kind: type, title: str) -> None:
        """Add the options of a dataclass as a group of the help."""
        group = self.add_argument_group(title)
        for declared in options_of(kind):
            names = []
            for name in [declared.name, *declared.aliases]:
                self.options[name] = declared
                # Each name may be written with dashes, too.
                for spelling in dict.fromkeys([name, name.replace("_", "-")]):
                    names.append(f"--{spelling}")
            target = self.first if declared.first else group
            value_kind, is_list = kinds_of(kind)[declared.name]
            settings = _settings_of_argparse(declared, value_kind, is_list)
            target.add_argument(*names, dest=declared.name, **settings)


def _settings_of_argparse(declared: Option, kind: Any, is_list: bool) -> dict[str, Any]:
    """Return what argparse is told of an option with values of a kind."""
    help_text, default = declared.help, declared.default
    if default not in (None, False, ""):
        shown = " ".join(map(str, listed(default)))
        help_text = f"{help_text} [{shown}]".strip()
    settings: dict[str, Any] = {"help": help_text.replace("%", "%%")}
    if is_list:
        settings["nargs"] = "+"
    if get_origin(kind) is Literal:
        settings["choices"] = get_args(kind)
    elif declared.choices:
        settings["choices"] = declared.choices
    elif kind is bool:
        settings |= {"nargs": "?", "const": True, "type": switch}
    elif kind in (int, float):
        settings["type"] = kind
    return settings


def switch(text: str) -> bool:
    """Read the value of a switch."""
    if text.lower() in ("true", "t", "yes", "y", "1"):
        return True
    if text.lower() not in ("false", "f", "no", "n", "0"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text}")
    return False


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each option, and the kind of its values."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        name = action.option_strings[0]
        if action.const is True:
            return name
        kind = "NAME"
        if action.type is int:
            kind = "N"
        elif action.type is float:
            kind = "X"
        return f"{name} {self._format_args(action, kind)}".rstrip()


def check_hub_names(values: Mapping[str, Any], options: Mapping[str, Option]) -> None:
    """Reject models and corpora that are neither local nor on the hub, before slow work starts."""
    # Importing the hub's library takes a moment, which --help should not.
    from vocagnolm.shell.hub import check_name

    for option, value in values.items():
        declared = options.get(option)
        if declared and declared.hub:
            for name in listed(value):
                if name:
                    check_name(option, name, declared.hub)


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
            token = at_shell.set(True)
            # Other errors are bugs of this project and keep their traceback.
            try:
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
            finally:
                at_shell.reset(token)

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

    Rank 0 prints an error that all processes share. Others print only their own, with their rank.
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
    """Raise KeyboardInterrupt, so that a command removes its unfinished files."""
    # A forked process has inherited the handler. Pools end their workers with SIGTERM, and would
    # wait for a worker that first cleans up what is not its own.
    if os.getpid() != owner:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
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
    sys.stdout.flush()
    # When Python exits normally, gloo's threads sometimes abort it.
    os._exit(status)


# The command is `python -m vocagnolm`. Scripts of earlier versions use this module's name.
if __name__ == "__main__":
    runpy.run_module("vocagnolm", run_name="__main__", alter_sys=True)
