"""The page of options is the one that the dataclasses make."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments

from vocagnolm.run import options
from vocagnolm.run.parse import parse

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_page_is_the_one_the_command_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == options.options_page(), (
        "make it again: python -m vocagnolm.run.options > docs/options.md"
    )


def test_page_has_every_option_of_ours() -> None:
    ours = {name for part in vars(parse(["--teacher", "T"])).values() for name in vars(part)}
    ours -= set(vars(TrainingArguments("out", use_cpu=True)))
    page = options.options_page()
    missing = [name for name in ours if not name.startswith("_") and f"`--{name}`" not in page]
    assert missing == []


def test_shown_default_is_as_typed() -> None:
    shown = [options._shown(value) for value in (None, "", True, 8e-5, 2048, "cosine")]
    assert shown == ["none", "none", "`true`", "`8e-05`", "`2048`", "`cosine`"]
