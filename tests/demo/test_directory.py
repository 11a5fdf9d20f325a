"""The directory of the demo: who owns its files, and what happens to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vocagnolm.demo.directory import claimed, leave_for_the_docs
from vocagnolm.shell.io import MADE_FILE, claim_names

NAMES = ["cache", "pages.jsonl", "results.json", "seed1", "student", "talks.jsonl", "teacher"]


@pytest.mark.parametrize("name", NAMES)
def test_claim_fails_when_no_demo_made_what_is_there(name: str, tmp_path: Path) -> None:
    for kind in ("directory", "file", "broken link"):
        place = tmp_path / kind
        place.mkdir()
        path = place / name
        if kind == "directory":
            path.mkdir()
        elif kind == "file":
            path.write_text("mine")
        else:
            path.symlink_to("nowhere")
        # Another command's record says nothing about the demo.
        claim_names(place, [], "another")
        before = os.lstat(path)
        with pytest.raises(ValueError, match=name), claimed(place, [0, 1]):
            pass
        assert os.lstat(path) == before


def make(directory: Path, seed: int) -> None:
    """Make the directory of a seed, and the links into it."""
    home = directory / f"seed{seed}"
    (home / "base").mkdir(parents=True)
    (home / "pages.jsonl").write_text("")
    leave_for_the_docs(directory, seed)


def test_links_lead_to_what_the_docs_train_on(tmp_path: Path) -> None:
    make(tmp_path, 1)
    assert (tmp_path / "student").resolve() == tmp_path / "seed1" / "base"
    assert (tmp_path / "pages.jsonl").resolve() == tmp_path / "seed1" / "pages.jsonl"
    assert (tmp_path / "teacher" / "config.json").is_file()
    assert (tmp_path / "talks.jsonl").read_text().startswith('{"prompt": ')


def test_claim_removes_what_earlier_demos_made(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with claimed(tmp_path, [0, 1]):
        (tmp_path / "seed0").mkdir()
        make(tmp_path, 1)
    # Another command's names are noted next to the demo's.
    claim_names(tmp_path, ["a"], "another")
    # A seed that is not run again keeps its students.
    with claimed(tmp_path, [1, 2]):
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == [".lock", MADE_FILE, "notes", "seed0"]
    with claimed(tmp_path, [0]):
        assert not (tmp_path / "seed0").exists()


@pytest.mark.parametrize("name", ["pages.jsonl", "student", "talks.jsonl", "teacher"])
def test_claim_fails_when_a_link_was_replaced(name: str, tmp_path: Path) -> None:
    with claimed(tmp_path, [1]):
        make(tmp_path, 1)
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=name), claimed(tmp_path, [1]):
        pass
    assert (tmp_path / name).read_text() == "mine"
    assert (tmp_path / "seed1").exists()


def test_claim_fails_when_another_demo_runs_there(tmp_path: Path) -> None:
    with claimed(tmp_path, [0]):
        (tmp_path / "seed0").mkdir()
        with pytest.raises(ValueError, match="another demo"), claimed(tmp_path, [0]):
            pass
        assert (tmp_path / "seed0").exists()
    with claimed(tmp_path, [0]):
        pass


def test_claim_fails_when_the_directory_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ValueError, match="--output_dir"), claimed(path, [0]):
        pass
