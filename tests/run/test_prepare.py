"""`vocagnolm prepare`: what a run would do first, done ahead of it, and found by it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from adapter_world import World

import vocagnolm.data
from vocagnolm.run import documents, prepare
from vocagnolm.run import main as train


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the corpus be one of which a plan reads only the first documents."""
    monkeypatch.setattr(documents, "_SAMPLE_DOCUMENTS", 40)
    monkeypatch.setattr(documents, "_SMALL_DOCUMENTS", 50)


def test_run_finds_what_was_prepared(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = world.argv("run", use_cpu="True")
    assert prepare.main(argv) == 0
    told = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["corpus", "blocks", "alignment", "prepared"]
    assert re.fullmatch(
        r"prepared   \S+ GB \([\d.]+ bytes per student token\) in .*, \d+ s, [\d,]+ student tokens "
        r"per second",
        told[-1],
    )
    assert not (world.root / "run").exists()

    def encode_again(*_: object) -> None:
        pytest.fail("a document is aligned again")

    monkeypatch.setattr(vocagnolm.data._Aligner, "align_batch", encode_again)
    assert train.main([*argv, "--dry_run"]) == 0
    assert told[:3] == [line for line in capfd.readouterr().out.splitlines() if line in told]


@pytest.mark.usefixtures("large")
def test_large_corpus_is_estimated_first(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(world.argv("run", use_cpu="True", max_length="32")) == 0
    told = capfd.readouterr().out
    words = ["prepare", "disk", "corpus", "blocks", "alignment", "prepared"]
    assert [line.split()[0] for line in told.splitlines() if line[0] != " "] == words
    assert "48 documents" in told  # and 12 held out
    # Of the tokens of all 60; of the 48 alone it would be 13 or more.
    assert float(re.search(r"\(([\d.]+) bytes per", told)[1]) < 12  # type: ignore[index]


@pytest.mark.usefixtures("large")
def test_full_disk_is_said_before_the_work(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(Path, "rglob", lambda *_: iter(()))
    assert prepare.main(world.argv("run", use_cpu="True", max_length="16")) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert "prepare: error: not enough disk: " in error
    assert "for the aligned corpus in" in error


def test_wrong_option_is_one_line(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    assert prepare.main(world.argv("run", use_cpu="True", dataset="no.jsonl")) == 2
    assert capfd.readouterr().err == (
        "vocagnolm prepare: error: --dataset no.jsonl: no such file or directory\n"
    )
