"""One run at a time: the lock of an output directory."""

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
# A network file system may take this long to drop the lock of a machine that died.
_PATIENCE_S = 120
# Locks of this process, by file. A POSIX lock ends with the first close of its file, so each stays
# open here, and is never opened a second time.
_held: dict[Path, TextIO] = {}


def take(directory: Path, patience_s: int | None = None) -> None:
    """Lock a directory, made if need be, until `release` or the end of this process.

    A ValueError if another process keeps the lock for `patience_s`, two minutes by default.
    """
    path = directory.resolve() / LOCK_FILE
    if path in _held:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    left = _PATIENCE_S if patience_s is None else patience_s
    file = _open_locked(path)
    if left and not file:
        logger.warning("waiting for another run: %s is held by %s", path, _holder(path))
    while left and not file:
        time.sleep(1)
        left, file = left - 1, _open_locked(path)
    if not file:
        raise ValueError(
            f"--output_dir {directory} is written to by another run ({_holder(path)}): stop it, "
            "or give another --output_dir"
        )
    # For the message of a process that waits.
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file


def release(directory: Path) -> None:
    """Unlock a directory and remove the lock's file."""
    path = directory.resolve() / LOCK_FILE
    if file := _held.pop(path, None):
        # While the lock is held, so that nobody else has a new file there yet.
        path.unlink(missing_ok=True)
        file.close()


@contextmanager
def locked(directory: Path, patience_s: int | None = None) -> Iterator[None]:
    """Hold the lock of a directory; see `take`."""
    take(directory, patience_s)
    try:
        yield
    finally:
        release(directory)


def _open_locked(path: Path) -> TextIO | None:
    """Open and lock a file with a POSIX lock, which forked processes do not inherit."""
    file = path.open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # POSIX allows either where another process holds the lock.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            return None
        logger.warning("%s cannot be locked (%s): let one run only write to it", path, error)
    # If `release` unlinked the file between open and lock, the lock binds nobody: open it again.
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return _open_locked(path)


def _holder(path: Path) -> str:
    """Name the process that wrote a lock's file."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return "a process that has just ended"
