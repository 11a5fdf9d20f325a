"""What is on the disk, and when: no file gets its name before its bytes are safe."""

from __future__ import annotations

import errno
import gzip
import os
import re
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.shell import io as files


def test_file_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("the old one")
    flushed: list[int] = []

    def flush(handle: int) -> None:
        assert path.read_text() == "the old one"
        flushed.append(os.fstat(handle).st_size)

    monkeypatch.setattr(os, "fsync", flush)
    files.write_file(path, lambda file: file.write(b"the new one!"))
    assert flushed == [len("the new one!")]
    assert path.read_text() == "the new one!"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [True, False])
def test_failed_write_leaves_the_old_file_alone(tmp_path: Path, replace: bool) -> None:
    def write(file: Any) -> None:
        file.write(b"a part")
        raise OSError(28, "No space left on device")

    (tmp_path / "run.json").write_text("the old one")
    with pytest.raises(OSError, match=r"No space left on device: .*run.json"):
        files.write_file(tmp_path / "run.json", write, replace=replace)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the old one"]


def test_text_comes_back_when_it_was_written(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl.gz"):
        files.write_text(tmp_path / name, "数学\n")
    assert (tmp_path / "a.txt").read_bytes() == "数学\n".encode()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) == "数学\n".encode()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EFBIG, "File too large"),
        Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 5312 vs 5204"),
    ],
)
def test_full_disk_is_known_by_what_any_library_raises(error: Exception, tmp_path: Path) -> None:
    words = rf"{re.escape(str(tmp_path))} cannot be written .*Go on\."
    with (
        pytest.raises(files.FullDiskError, match=words),
        files.explain_full_disk(tmp_path, lambda: "Go on."),
    ):
        raise error


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.ENOENT, "no"), RuntimeError("size mismatch")):
        with (
            pytest.raises(type(error), match=f"^{re.escape(str(error))}$"),
            files.explain_full_disk(tmp_path, lambda: "Go on."),
        ):
            raise error
