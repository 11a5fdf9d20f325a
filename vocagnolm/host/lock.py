"""One run at a time: a directory that two runs wrote to at once would be neither's."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_PATIENCE_S = 120  # a network file system needs so long to learn that a machine is gone
_TAKEN = (errno.EACCES, errno.EAGAIN)
_held: dict[Path, TextIO] = {}


def take(directory: Path) -> None:
    """Keep other processes that ask for it out of a directory, until `release` or this one's end.

    Raises:
        ValueError: another process has it, and keeps it for two minutes.
    """
    path = directory.resolve() / LOCK_FILE
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+", encoding="utf-8")
    for waited in range(_PATIENCE_S):
        if _try_to_take(file, path):
            break
        if not waited:
            logger.warning("waiting for another run: %s is held by %s", path, path.read_text())
        time.sleep(1)
    else:
        file.close()
        raise ValueError(
            f"--output_dir {directory} is written to by another run ({path.read_text()}): stop it, "
            "or give another --output_dir"
        )
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file  # open as long as it is held


def release(directory: Path) -> None:
    """Let others in, and leave no trace."""
    path = directory.resolve() / LOCK_FILE
    if file := _held.pop(path, None):
        path.unlink(missing_ok=True)
        file.close()


def _try_to_take(file: TextIO, path: Path) -> bool:
    """Try to take a POSIX lock, which processes that are forked do not inherit."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        logger.warning("%s cannot be locked (%s): let one run only write to it", path, error)
    return True
