"""A directory that another process holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = """
import sys
from pathlib import Path
from vocagnolm.host import lock
lock.take(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked_elsewhere(directory: Path) -> Iterator[None]:
    """Let another process hold the lock of a directory."""
    command = [sys.executable, "-c", _PROGRAM, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        yield
        process.communicate()
