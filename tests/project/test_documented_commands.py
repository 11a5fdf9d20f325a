"""Programs accept every command that the README and the pages tell one to type."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from vocagnolm.__main__ import COMMANDS
from vocagnolm.run.launch import split
from vocagnolm.run.parser import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path for place in (".", "docs", "benchmarks") for path in sorted(ROOT.glob(f"{place}/*.md"))
]
SCRIPTS = {"train.py": "train", "evaluate_math.py": "evaluate"}


def typed_commands() -> list[Any]:
    """Return the words of each line that runs Python, from code blocks without a language."""
    found = []
    for page in PAGES:
        for block in blocks_without_language(page.read_text(encoding="utf-8")):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                words = words_of(line)
                if words and words[0] in ("vocagnolm", "python", "accelerate", "sbatch"):
                    found.append(pytest.param(words, id=f"{page.name}: {line.strip()[:90]}"))
    return found


def blocks_without_language(text: str) -> list[str]:
    """Return the code blocks whose opening fence names no language.

    A closing fence looks like such an opening one, so fences are read in pairs.
    """
    blocks = []
    opening: int | None = None
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opening is None:
            opening = index
            continue
        if lines[opening] == "```":
            blocks.append("\n".join(lines[opening + 1 : index]))
        opening = None
    return blocks


def words_of(line: str) -> list[str]:
    """Split a line into words, without prompt, comment and environment variables."""
    try:
        words = shlex.split(line.replace("RANK", "0"), comments=True)
    except ValueError:  # prose with an apostrophe
        return []
    while words and re.match(r"\$$|[A-Z_]+=", words[0]):
        del words[0]
    return words


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """Return the `vocagnolm` command or the module that a line runs, and its arguments."""
    first, *rest = words
    if first == "vocagnolm":
        return rest[0], rest[1:]
    if first == "accelerate":
        given = launch_command_parser().parse_args(rest[1:])
        assert given.config_file is None or Path(given.config_file).is_file()
        module = ["-m"] if given.module else []
        return program_of(["python", *module, given.training_script, *given.training_script_args])
    if first == "sbatch":
        return "train", rest[rest.index("accelerate_configs/slurm.sh") + 1 :]
    if rest[0] != "-m":
        assert Path(rest[0]).is_file()
        return SCRIPTS.get(rest[0], ""), rest[1:]
    if rest[1] == "vocagnolm":
        return program_of(["vocagnolm", *rest[2:]])
    assert importlib.util.find_spec(rest[1])
    return "", rest[2:]


class Read(BaseException):
    """Raised when a command has read its options."""


@pytest.fixture(autouse=True)
def _stand_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a copy of the checkout that also has the directories and files that pages name."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "DATA").mkdir()
    (tmp_path / "PROMPTS/cot").mkdir(parents=True)
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    for name, text in re.findall(r"^`([\w.]+)`[^\n]*:\n\n```\w+\n(.*?)^```", page, re.M | re.S):
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("words", typed_commands())
def test_command_to_type_is_taken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, argv = program_of(words)
    if not name or {"--help", "--help_all", "--version"} & {name, *argv}:
        return
    if "--accelerate_config" in argv:
        _, argv = split(argv)
    if name in ("train", "prepare"):
        assert parse(argv)
        return
    module, read = importlib.import_module(COMMANDS[name][0]), argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, args: Any = None, _: Any = None) -> None:
        read(parser, args)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    with pytest.raises(Read):
        module.main(argv)
