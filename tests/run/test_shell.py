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
    parser.add_argument("--flag", action="store_true")
    with pytest.raises(ValueError, match=r"^--count must not be negative, got -1$"):
        parser.parse_args(["--count", "-1"])
    arguments = parser.parse_args(["--count", "0", "--weight", "-1.5", "--label=-1", "--flag"])
    assert vars(arguments) == {"count": 0, "weight": -1.5, "label": "-1", "flag": True}
    assert parser.parse_args([]).count == 3


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


def run_as_audit(directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `mine.py` of a directory as the command `audit`."""
    begin = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vocagnolm import __main__ as command; "
        "command.COMMANDS['audit'] = ('mine', ''); command.start()"
    )
    environ["PYTHONPATH"] = os.pathsep.join([str(directory), *sys.path])
    command = [sys.executable, "-c", begin, "audit"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ})


@pytest.mark.processes
def test_interrupt_is_one_line(tmp_path: Path) -> None:
    send = "os.kill(os.getpid(), signal.SIGINT)"
    work = f"from vocagnolm.cli import shell\n@shell('mine')\ndef main(argv):\n    {send}\n"
    (tmp_path / "mine.py").write_text("import os, signal\n" + work)
    done = run_as_audit(tmp_path)
    assert (done.returncode, done.stderr) == (cli.Exit.INTERRUPTED, "mine: interrupted\n")


# A command that holds a temporary directory, and then does something.
HOLDING = """
import os, signal, time
from tempfile import TemporaryDirectory
from vocagnolm.cli import shell
@shell("mine")
def main(argv):
    with TemporaryDirectory(dir="{0}"):
        {1}
"""


@pytest.mark.processes
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("several", [False, True])
def test_ended_command_leaves_nothing_behind_when_it_is_alone(
    name: str, several: bool, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    send = f"os.kill(os.getpid(), signal.{name})"
    (tmp_path / "mine.py").write_text(HOLDING.format(place, send))
    done = run_as_audit(tmp_path, **({"RANK": "0"} if several else {}))
    if several:
        # Cleaning up might wait for the other processes.
        assert done.returncode == -getattr(signal, name)
        return
    assert (done.returncode, done.stderr) == (cli.Exit.INTERRUPTED, "mine: interrupted\n")
    assert not list(place.iterdir())


@pytest.mark.processes
def test_ended_process_of_a_pool_leaves_alone_what_is_its_parents(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    # The child reports that it runs, because Python drops signals that arrive during a fork.
    fork = (
        "ready, there = os.pipe(); child = os.fork(); "
        "child or (os.write(there, b'.'), time.sleep(60), os._exit(0)); "
        "os.read(ready, 1); os.kill(child, signal.SIGTERM); "
        f"print(os.waitpid(child, 0)[1], len(os.listdir('{place}')))"
    )
    (tmp_path / "mine.py").write_text(HOLDING.format(place, fork))
    done = run_as_audit(tmp_path)
    # The status of a process that a signal has ended is the signal's number.
    assert done.stdout == f"{signal.SIGTERM:d} 1\n", done.stderr
