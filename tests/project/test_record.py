"""Whose an output directory is, and what the results in it were made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from vocagnolm import record
from vocagnolm.record import check_output_directory, output_directory

RUN = "run.json"


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "audit.json", "runs/a"])
def test_directory_of_other_files_is_rejected(name: str, tmp_path: Path) -> None:
    check_output_directory(tmp_path, RUN)
    for of_job in (".git", "slurm-17.out", "train.log"):
        (tmp_path / of_job).touch()
    check_output_directory(tmp_path, RUN)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(ValueError, match=path.relative_to(tmp_path).parts[0]):
        check_output_directory(tmp_path, RUN)
    (tmp_path / RUN).touch()
    check_output_directory(tmp_path, RUN)


def test_directory_stays_a_commands_when_it_is_killed(tmp_path: Path) -> None:
    with output_directory(tmp_path, "ranks.jsonl"):
        (tmp_path / "student_losses").mkdir()
    check_output_directory(tmp_path, "ranks.jsonl")
    with pytest.raises(ValueError, match="student_losses"):
        check_output_directory(tmp_path, RUN)


def test_directory_inside_documents_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.jsonl").touch()
    (tmp_path / "link").symlink_to(documents)
    check_output_directory(tmp_path / "documents-2", RUN, [str(documents)])
    check_output_directory(documents / "run", RUN, [str(documents / "a.jsonl"), "a/hub-name"])
    monkeypatch.chdir(documents)
    for output_dir, name in (("run", "."), (documents, tmp_path / "link"), ("..", "../..")):
        with pytest.raises(ValueError, match="is inside"):
            check_output_directory(Path(output_dir), RUN, ["a/hub-name", str(name)])


def test_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=r"file cannot be written to"):
            check_output_directory(path, RUN)


def test_directory_is_locked_until_its_first_owner_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    other = FileLock(run / ".run.json.lock", timeout=0)
    with output_directory(run, RUN):
        with output_directory(tmp_path / "link" / ".." / "run", RUN, move_aside=True):
            pass
        with pytest.raises(Timeout):
            other.acquire()
    monkeypatch.setattr(record, "_LOCK_S", 0)
    with (
        other,
        pytest.raises(ValueError, match="another process"),
        output_directory(run, RUN),
    ):
        pass
    assert "waiting" in caplog.text


def test_what_is_there_moves_aside_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")
    for number in (1, 2):
        with output_directory(run, RUN):
            (run / RUN).write_text(str(number))
            (run / "checkpoint-3").mkdir()
        with output_directory(run, RUN, move_aside=True):
            assert [path.name for path in run.iterdir()] == [".run.json.lock"]
            with pytest.raises(Timeout):
                FileLock(run / ".run.json.lock", timeout=0).acquire()
        assert Path(f"run-earlier-{number}", RUN).read_text() == str(number)
        assert Path(f"run-earlier-{number}", "checkpoint-3").is_dir()
