"""A directory is written to by one run at a time."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.host import lock

HOLD = """
import sys, time
from pathlib import Path
from typing import Any
from vocagnolm.host import lock
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.processes
def test_directory_is_refused_when_another_process_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 1)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    try:
        expected = (
            f"--output_dir {tmp_path / 'run'} is written to by another run .process {other.pid}"
        )
        with (
            caplog.at_level(logging.WARNING, logger="vocagnolm.host.lock"),
            pytest.raises(ValueError, match=expected),
        ):
            lock.take(tmp_path / "run")
        assert "waiting for another run" in caplog.text
    finally:
        other.kill()
        other.wait()
    lock.take(tmp_path / "run")  # it ended with its process
    lock.take(tmp_path / "run")  # one's own is no other's
    lock.release(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_holder_may_end_while_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)  # as a moment before
    assert lock._holder(tmp_path / lock.LOCK_FILE) == "a process that has just ended"


def test_lock_binds_when_its_file_was_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two would hold it: one that opened the file before `release`, and one after."""
    lockf, path, opened = lock.fcntl.lockf, tmp_path / lock.LOCK_FILE, []

    def late(file: Any, operation: int) -> None:
        opened.append(file)
        if len(opened) == 1:
            path.unlink()
        lockf(file, operation)

    monkeypatch.setattr(lock.fcntl, "lockf", late)
    with lock.locked(tmp_path, patience_s=0):
        assert len(opened) == 2
        assert path.read_text().startswith("process ")
    assert list(tmp_path.iterdir()) == []
