"""The pages of options are those that the dataclasses make."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import TrainingArguments

from vocagnolm.run import HELP_PAGE, options, start
from vocagnolm.run.training_arguments import RunArguments

ROOT = Path(__file__).resolve().parents[2]
OURS = [*vars(RunArguments)["__annotations__"]]
TRAINERS = {each.name for each in fields(TrainingArguments)}


@pytest.mark.skipif("activation_checkpointing" not in TRAINERS, reason="not in this transformers")
@pytest.mark.parametrize(
    ("page", "make"),
    [(ROOT / "docs" / "options.md", options.options_page), (HELP_PAGE, options.help_page)],
)
def test_page_is_the_one_the_command_makes(page: Path, make: object) -> None:
    assert callable(make)
    written = page.read_text(encoding="utf-8")
    assert written == make(), "make it again: python -m vocagnolm.run.options"


def names_in(page: str) -> Counter[str]:
    return Counter(re.findall(r"^  --(\w+)", page, re.MULTILINE))


def test_help_shows_all_of_ours_before_the_others() -> None:
    short, whole = names_in(options.help_page()), names_in(options.help_page(everything=True))
    # Each once, under one subject.
    assert set(short.values()) == set(whole.values()) == {1}
    assert short.keys() >= {*OURS, "student", "dataset", "method", "top_k", "lora_r", "config"}
    assert list(whole)[: len(short)] == list(short)
    assert whole.keys() >= TRAINERS - options.REJECTED.keys()
    assert not whole.keys() & options.REJECTED.keys()


def test_every_option_of_ours_has_a_meaning() -> None:
    found = options._options()
    shown = [name for names in options.sections().values() for name in names if name in found]
    assert [name for name in [*OURS, *shown] if not found[name].meaning] == []


def test_help_fits_a_terminal() -> None:
    lines = options.help_page(everything=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(options.help_page().splitlines()) < 230


@pytest.mark.parametrize("flag", ["-h", "--help", "--help_all"])
def test_help_is_shown(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        start.main(["--teacher", "t", flag])
    assert left.value.code == 0
    assert capfd.readouterr().out.startswith("usage: train.py ")


@pytest.mark.processes
def test_help_starts_at_once() -> None:
    """What training imports takes over three seconds."""
    command = [sys.executable, "-X", "importtime", "train.py", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.startswith("usage: train.py ")
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "vocagnolm.run.start" in imported
    assert not imported & {"torch", "transformers", "datasets", "numpy"}


def test_shown_default_is_as_typed() -> None:
    shown = [options._shown(value) for value in (None, "", True, 8e-5, 2048, "cosine")]
    assert shown == ["", "", "true", "8e-05", "2048", "cosine"]
