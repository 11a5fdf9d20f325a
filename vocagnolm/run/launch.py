"""Starts several processes of one command. `--accelerate_config` works like `accelerate launch`.

In addition, every process gets a signal once, and the job's exit status is that of its processes.
"""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from vocagnolm.cli import OneLineErrors
from vocagnolm.fields import OptionError
from vocagnolm.run.recipe import as_flags, find_file
from vocagnolm.shell.io import log_main

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
# Options of `accelerate launch` that differ between machines and runs. A file has the others.
_OPTIONS: dict[str, type] = {
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_port": int,
    "main_process_ip": str,
    "gpu_ids": str,
    "mixed_precision": str,
}


def launch(command: str, argv: Sequence[str], check: Callable[[Sequence[str]], object]) -> int:
    """Run a command in the processes that `--accelerate_config` describes, and return its status.

    The command's `check` reads its own options before any process is started.

    Raises:
        ValueError: the file or an option, perhaps the command's, is wrong. Nothing is started.
    """
    words, command_argv = split(argv)
    # Every process of a job would start its own job.
    if "RANK" in os.environ:
        raise OptionError("accelerate_config", "starts the processes: leave accelerate launch out")
    check(command_argv)
    words += ["--module", "vocagnolm", command]
    words += command_argv
    return _run(words)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words for `accelerate launch`, and those for the command."""
    parser = OneLineErrors(allow_abbrev=False, add_help=False)
    parser.add_argument("--accelerate_config", required=True)
    for name, kind in _OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind)
    # Unknown words are for the command, whose own parser reads them.
    launch_options, command_argv = parser.parse_known_args(argv)
    options = vars(launch_options)
    path = find_file("accelerate_config", options.pop("accelerate_config"), CONFIGS)
    return as_flags({"config_file": path} | options), command_argv


def _run(words: Sequence[str]) -> int:
    """Start the processes with Accelerate, and wait for them.

    Raises:
        KeyboardInterrupt: a signal ended the job.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_command_parser().parse_args(words)
    # After SIGINT or SIGTERM, torchrun kills every worker within 30 s, whether it has saved its
    # state or not. `_forward` handles these signals instead, and gives workers the time they need.
    arguments.signals_to_handle = "SIGHUP,SIGQUIT"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, _forward)
    # The processes themselves say why they end.
    logging.disable(logging.ERROR)
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        # A process that failed has a positive status. Others were killed because of it, and have
        # negative ones, the numbers of signals. So the largest is that of a failure.
        status = max(failure.exitcode for failure in error.failures.values())
    except subprocess.CalledProcessError as error:
        status = error.returncode
    except SignalException as error:
        # A terminal was closed, for example, and torchrun has ended the processes.
        raise KeyboardInterrupt from error
    else:
        return 0
    # A negative status is the number of a signal. Processes that do not train end with the signal
    # that stops the job.
    if -status in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        raise KeyboardInterrupt
    # A shell reports 128 plus the number of a signal.
    if status < 0:
        name = signal.Signals(-status).name
        log_main(f"vocagnolm: error: {name} ended a process")
        return 128 - status
    return status


def _forward(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the processes of the job. If there are none yet, exit."""
    import psutil

    # Only direct children belong to the job. They stop their own children.
    children = psutil.Process().children()
    if not children:
        raise KeyboardInterrupt
    for child in children:
        # A child may end between the list and the signal.
        with suppress(ProcessLookupError):
            # A terminal sends Ctrl-C to all processes of its session.
            shares_terminal = sys.stdin.isatty() and os.getsid(child.pid) == os.getsid(0)
            if number != signal.SIGINT or not shares_terminal:
                os.kill(child.pid, number)
