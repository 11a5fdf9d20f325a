"""What can be known early is reported before alignment, by a dry run as by the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from world import World

from vocagnolm.run import parser
from vocagnolm.training import packed


def argv_of(world: World, out: Path, **changes: str) -> list[str]:
    """A command line without an evaluation."""
    options = {"eval_fraction": None, "use_cpu": "True", "save_total_limit": "2", **changes}
    return world.argv(str(out), **options)


def plan_of(capfd: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, str]:
    """The lines of a plan by their first word."""
    capfd.readouterr()
    assert parser.main([*argv, "--dry_run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    return {line[:11].strip(): line[11:] for line in lines}


def test_plan_of_a_large_corpus_is_extrapolated(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    epoch: dict[str, Any] = {"max_steps": "-1", "num_train_epochs": "3"}
    argv = argv_of(world, tmp_path / "out", **epoch)
    whole = plan_of(capfd, argv)
    monkeypatch.setattr(packed, "_SMALL_DOCUMENTS", 20)
    monkeypatch.setattr(packed, "_SAMPLE_DOCUMENTS", 40)
    part = plan_of(capfd, argv)
    assert part["corpus"].startswith("pages.jsonl: of the first ones, 40 documents, ")
    assert part["steps"].endswith(" (from 40 of 60 documents)")
    steps = [int(plan["steps"].removeprefix("about ").split(",")[0]) for plan in (whole, part)]
    assert steps[1] == pytest.approx(steps[0], rel=0.2)
    for word in ("student", "teacher", "method", "batch", "memory", "output"):
        assert part[word] == whole[word]


def test_plan_shows_an_alignment(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = plan_of(capfd, argv_of(world, tmp_path / "out"))["example"].split(" | ")
    assert len(shown) == 6
    for each in shown:
        ours, theirs = (side.replace("'", "").replace(" ", "") for side in each.split(" -> "))
        assert ours in theirs


def test_plan_says_which_files_of_a_directory_are_read(
    world: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    shutil.copy(world.pages, corpus)
    (corpus / "NOTES.txt").write_text("notes")
    plan = plan_of(capfd, argv_of(world, tmp_path / "out", dataset=str(corpus)))
    assert plan["files"] == "corpus: read 1 file of train; left out: NOTES.txt"


def test_small_corpus_is_read_whole_when_its_part_is_too_small(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(packed, "_SMALL_DOCUMENTS", 3)
    monkeypatch.setattr(packed, "_SAMPLE_DOCUMENTS", 3)
    argv = argv_of(world, tmp_path / "out", global_batch_tokens="640000", dry_run="True")
    assert parser.main(argv) == 2
    assert "one optimizer step needs 10,000" in capfd.readouterr().err


def test_last_evaluation_is_of_the_best_model_that_is_saved(world: World, tmp_path: Path) -> None:
    steps = {"max_steps": "2", "save_steps": "1", "eval_steps": "1", "learning_rate": "0.3"}
    best = {"load_best_model_at_end": "True", "eval_fraction": "0.2"}
    assert parser.main(argv_of(world, tmp_path, **steps, **best)) == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    first, worse, last = (e["eval_loss"] for e in state["log_history"] if "eval_loss" in e)
    assert first == last < worse
