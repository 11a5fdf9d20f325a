"""Wrong command lines: one line on stderr that says what to do, and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from vocagnolm.cli import COMMANDS, main, quiet_logs

MODELS = ("--student", "S", "--teacher", "T")
# Command lines of `vocagnolm`, and what their errors begin with.
WRONG: dict[tuple[str, ...], str] = {
    (): "vocagnolm: error: the following arguments are required: COMMAND",
    ("nosuch",): "vocagnolm: error: argument COMMAND: invalid choice: 'nosuch'",
    ("compare",): "vocagnolm compare: error: expected a RUN to compare, found none: give",
    ("compare", "r", "--figure", "2"): "vocagnolm compare: error: argument --figure: invalid",
    # Said before what may be a download.
    ("compare", "--wandb", "/no/wandb", "--figure", "3"): (
        "vocagnolm compare: error: --figure needs --output_dir: say where the figures shall be"
    ),
    ("inspect", *MODELS): "vocagnolm inspect: error: one of the arguments --text --text_file",
    ("inspect", *MODELS, "--text_file", "/no/file"): (
        "vocagnolm inspect: error: --text_file /no/file: expected a file in UTF-8, found: "
    ),
    ("inspect", *MODELS, "--text", "t", "--output_dir", "/proc/x/y"): (
        "vocagnolm inspect: error: --output_dir /proc/x/y: /proc cannot be written to ("
    ),
    ("train", "--output_dir", "/proc/x/y", "--method", "cpt", "--use_cpu"): (
        "train.py: error: --output_dir /proc/x/y: /proc cannot be written to ("
    ),
    ("audit", *MODELS, "--dataset", "d", "--document", "1"): (
        "vocagnolm audit: error: unrecognized arguments: --document 1 (did you mean --documents?)"
    ),
    ("evaluate", "--model", "m", "--output-dir", "o"): (
        "vocagnolm evaluate: error: unrecognized arguments: --output-dir o (did you mean "
        "--output_dir?)"
    ),
    ("train", "--teacher", "t", "--agregation", "max"): (
        "train.py: error: unrecognized arguments: --agregation max (did you mean --aggregation?)"
    ),
    ("audit", "--student", "/no/model", "--teacher", "t", "--dataset", "d"): (
        "vocagnolm audit: error: student tokenizer /no/model: no such file or directory"
    ),
    ("demo", "--methods", "cpt", "--guidance", "top_k=1"): (
        "vocagnolm demo: error: --guidance has no effect without VocAgnoLM among --methods: leave"
    ),
    ("demo", "--output_dir", "/dev/null"): (
        "vocagnolm demo: error: --output_dir /dev/null: /dev/null is a file, not a directory"
    ),
    ("export",): "vocagnolm export: error: the following arguments are required: checkpoint",
}


@pytest.mark.parametrize("argv", WRONG, ids=" ".join)
def test_wrong_command_line_ends_in_one_line(
    argv: Sequence[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith(WRONG[tuple(argv)]), captured.err
    assert (captured.out, captured.err.count("\n")) == ("", 1)


def test_wrong_recipe_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("topk: 0.5\n")
    assert main(["train", "--config", str(recipe)]) == 2
    assert capfd.readouterr().err == (
        f"train.py: error: --config {recipe}, line 1: unrecognized arguments: --topk=0.5 (did you "
        "mean --top_k?)\n"
    )


def test_output_survives_a_locale_without_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = TextIOWrapper(BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", narrow)
    quiet_logs()
    sys.stdout.write("caf\xe9\n")
    assert narrow.buffer.getvalue() == b"caf\\xe9\n"


def test_nearest_command_is_offered(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capfd.readouterr().err.endswith(" (did you mean train?)\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_a_help_page(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert capfd.readouterr().out.startswith("usage: ")
