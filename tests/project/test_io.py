"""What is on the disk, and when: no file gets its name before its bytes are safe."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.shell import io as files


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was flushed and renamed, in order, by name."""
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def flush(handle: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def rename(self: Path, target: Any) -> Any:
        done.append(("rename", Path(target).name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    return done


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names of open files are in /proc")
def test_file_is_flushed_before_it_has_its_name(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    path = tmp_path / "run.json"
    path.write_text("the old one")

    def write(file: Any) -> None:
        file.write(b"the new one")
        assert path.read_text() == "the old one"

    files.write_file(path, write)
    (flushed, aside), renamed = calls
    assert flushed == "flush"
    assert aside.endswith(files.TEMPORARY)
    assert renamed == ("rename", "run.json")
    assert path.read_text() == "the new one"
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


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz"])
def test_text_comes_back_when_it_was_written(tmp_path: Path, name: str) -> None:
    files.write_text(tmp_path / name, "数学\n")
    content = (tmp_path / name).read_bytes()
    assert (gzip.decompress(content) if name.endswith(".gz") else content).decode() == "数学\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]


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
    with (
        pytest.raises(files.FullDiskError) as caught,
        files.explain_full_disk(tmp_path, lambda: "Go on."),
    ):
        raise error
    assert str(caught.value).startswith(f"{tmp_path} cannot be written to: ")
    assert str(caught.value).endswith("Go on.")


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "no"), RuntimeError("size mismatch")])
def test_other_errors_stay_as_they_are(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, files.explain_full_disk(tmp_path, lambda: "Go on."):
        raise error
    assert caught.value is error
