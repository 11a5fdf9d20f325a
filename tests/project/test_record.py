"""Whose an output directory is, and what the results in it were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm import record
from vocagnolm.fields import options_of
from vocagnolm.record import check_output_directory, differences, output_directory
from vocagnolm.training.options import DataOptions, GuidanceOptions, ModelOptions, RunOptions

RUN = "run.json"


def test_directory_of_other_files_is_rejected(tmp_path: Path) -> None:
    for of_job in (".git", "slurm-17.out", "train.log"):
        (tmp_path / of_job).touch()
    check_output_directory(tmp_path, RUN)
    # A command that is killed at once leaves its lock.
    with output_directory(tmp_path, "ranks.jsonl"):
        (tmp_path / "student_losses").mkdir()
    check_output_directory(tmp_path, "ranks.jsonl")
    with pytest.raises(ValueError, match="student_losses"):
        check_output_directory(tmp_path, RUN)
    (tmp_path / RUN).touch()
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


def test_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match="file cannot be written"):
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
    with other, pytest.raises(ValueError, match="another process"), output_directory(run, RUN):
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


# Settings

ROLES: dict[str, list[str]] = {}
for declared in options_of(ModelOptions, DataOptions, GuidanceOptions, RunOptions):
    ROLES.setdefault(declared.role, []).append(declared.name)
KNOWN = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SCALARS = st.none() | KNOWN
# In a dictionary, None is the same as no entry.
VALUES = SCALARS | st.lists(SCALARS) | st.dictionaries(st.text(), KNOWN)
SETTINGS = st.dictionaries(st.sampled_from(ROLES["numbers"]), VALUES)
PATHS = st.sampled_from([Path("/scratch/1/p"), Path("/scratch/2/p"), Path("/scratch/1/q")])
# What is known about the content: nothing, one content or another.
DIGESTS = st.sampled_from([None, ["a"], ["b"]])


@given(before=SETTINGS, name=st.sampled_from(ROLES["numbers"]), value=VALUES)
def test_differences_name_the_setting_that_changed(
    before: dict[str, Any], name: str, value: Any
) -> None:
    read = json.loads(json.dumps(before))
    assert differences(read, before) == []
    changes = differences(read, {**before, name: value})
    assert bool(changes) == (read.get(name) != value)
    assert all(change.startswith(name) for change in changes)
    # An earlier version may have had settings that are gone.
    assert differences({**read, "retired": 1}, before) == []


@given(rest=SETTINGS, paths=st.tuples(PATHS, PATHS), digests=st.tuples(DIGESTS, DIGESTS))
def test_paths_count_by_their_names_where_the_content_is_known(
    rest: dict[str, Any], paths: tuple[Path, Path], digests: tuple[Any, Any]
) -> None:
    before, now = [
        rest | {"dataset": [str(path)], "corpus_digest": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]
    if not now["corpus_digest"]:
        del now["corpus_digest"]
    expected = set()
    if all(digests) and digests[0] != digests[1]:
        expected.add("the content of dataset has changed")
    if paths[0].name != paths[1].name or (paths[0] != paths[1] and not digests[0]):
        expected.add("dataset")
    assert {change.partition(" was ")[0] for change in differences(before, now)} == expected


def test_student_has_no_known_content() -> None:
    """Nothing tells one checkpoint-500 from another."""
    before = {"student": "/a/checkpoint-500", "corpus_digest": ["a"], "teacher_hashes": ["a"]}
    assert differences(before, {"student": "/b/checkpoint-500"})


def test_run_goes_on_whose_record_has_the_sizes_of_files() -> None:
    before = {"teacher": ["/a/t"], "teacher_files": [{"model.safetensors": 3}]}
    hashes = {"teacher_hashes": [{"model.safetensors": "a"}]}
    assert not differences(before, {"teacher": ["/a/t"], **hashes})
    assert differences(hashes, {"teacher_hashes": [{"model.safetensors": "b"}]})
