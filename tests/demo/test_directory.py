"""The directory of the demo: what is in it, and what the next demo removes."""

from __future__ import annotations

from pathlib import Path

from vocagnolm.demo.directory import fresh_directory, leave_for_the_docs


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


def test_demo_removes_what_earlier_demos_made(tmp_path: Path) -> None:
    with fresh_directory(tmp_path, [0, 1]):
        (tmp_path / "seed0").mkdir()
        make(tmp_path, 1)
    (tmp_path / "notes").mkdir()
    # A seed that is not run again keeps its students.
    with fresh_directory(tmp_path, [1, 2]):
        left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
        assert left == {"notes", "seed0"}
    with fresh_directory(tmp_path, [0]):
        assert not (tmp_path / "seed0").exists()
