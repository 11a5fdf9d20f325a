"""The shell's side of commands: what starts at once, and what an interrupted command leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vocagnolm import cli


def test_negative_integer_is_named_and_other_types_may_be_negative() -> None:
    parser = cli.Parser("command", None)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--weight", type=float)
    parser.add_argument("--label")
    with pytest.raises(ValueError, match=r"^--count .*-1$"):
        parser.parse_args(["--count", "-1"])
    arguments = parser.parse_args(["--count", "0", "--weight", "-1.5", "--label=-1"])
    assert vars(arguments) == {"count": 0, "weight": -1.5, "label": "-1"}


@pytest.mark.processes
def test_quick_answers_need_no_torch() -> None:
    code = (
        "import sys; from vocagnolm.run.parser import parse\n"
        "for argv in ('', '--teachr t', '--method vocagnlm', '--method a:B', '--top_k 3',\n"
        "             '--config none.yaml', '--help'):\n"
        "    try: parse(argv.split())\n"
        "    except (ValueError, SystemExit): assert 'torch' not in sys.modules, argv\n"
        "    else: raise AssertionError(argv)"
    )
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


# A command that holds a temporary directory, and then does something.
HOLDING = """
import os, signal, time
from tempfile import TemporaryDirectory
from vocagnolm.cli import shell
@shell("mine")
def main(argv):
    with TemporaryDirectory(dir="place"):
        {0}
"""
# Run it as the command `audit`.
BEGIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from vocagnolm import __main__ as command; "
    "command.COMMANDS['audit'] = ('mine', ''); command.start()"
)


def run_holding(directory: Path, work: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command that holds a temporary directory in `place` while it works."""
    (directory / "place").mkdir()
    (directory / "mine.py").write_text(HOLDING.format(work))
    environ["PYTHONPATH"] = os.pathsep.join([str(directory), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", BEGIN, "audit"],
        cwd=directory,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_ended_command_leaves_one_line(name: str, tmp_path: Path) -> None:
    done = run_holding(tmp_path, f"os.kill(os.getpid(), signal.{name})")
    assert (done.returncode, done.stderr) == (cli.Exit.INTERRUPTED, "mine: interrupted\n")
    assert not list((tmp_path / "place").iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_ends_one_of_several_processes_at_once(name: str, tmp_path: Path) -> None:
    # Cleaning up might wait for the other processes.
    done = run_holding(tmp_path, f"os.kill(os.getpid(), signal.{name})", RANK="0")
    assert done.returncode == -getattr(signal, name)


@pytest.mark.processes
def test_ended_process_of_a_pool_leaves_alone_what_is_its_parents(tmp_path: Path) -> None:
    # The child reports that it runs, because Python drops signals that arrive during a fork.
    fork = (
        "ready, there = os.pipe(); child = os.fork(); "
        "child or (os.write(there, b'.'), time.sleep(60), os._exit(0)); "
        "os.read(ready, 1); os.kill(child, signal.SIGTERM); "
        "print(os.waitpid(child, 0)[1], len(os.listdir('place')))"
    )
    done = run_holding(tmp_path, fork)
    # The status of a process that a signal has ended is the signal's number.
    assert done.stdout == f"{signal.SIGTERM:d} 1\n", done.stderr
