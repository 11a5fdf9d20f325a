"""Every command in the README and the pages is one that its program takes; none is run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from benchmarks import __main__ as benchmarks
from vocagnolm.cli import COMMANDS
from vocagnolm.evaluation import main as evaluation
from vocagnolm.report import audit, inspect
from vocagnolm.run.parse import make_parser, parse
from vocagnolm.store import score

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md")))
}
PROSE = {
    page: re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for page, text in PAGES.items()
}
MODULES = [
    path.stem if path.parent.name == "support" else ".".join(path.relative_to(ROOT).parts)[:-3]
    for path in [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/support/*.py")]
    if "ArgumentParser(" in path.read_text(encoding="utf-8")
]
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
Words = list[str]
# Programs that are not ours, and why their lines are not read.
OTHERS = {
    **dict.fromkeys(("export", "for", "done"), "the shell's: what is between is read"),
    "hf": "the hub's: test_hub.py pushes and reads by its API",
    "jq": "makes the corpora of one table",
    "llama_cpp.server": "no dependency, not even of the tests",
}
PROGRAMS = "|".join(
    (
        *("vocagnolm", "python", "train.py", "evaluate_math.py", "accelerate", "sbatch"),
        *("make", "pip", "pytest", *OTHERS),
    )
)
# Options in sentences that no parser has.
NOT_PARSED = {
    "--guidance_preset": "decision 44: there is none",
    **dict.fromkeys(("--help", "--help_all", "--version"), "read before the parser"),
    **dict.fromkeys(("--platform", "--python"), "pip's"),
    **dict.fromkeys(("--logits_all", "--kv_overrides"), OTHERS["llama_cpp.server"]),
}
# A message that goes on.
MESSAGE = "pip install 'vocagnolm["
SCRIPTS = {"train.py": "train", "evaluate_math.py": "evaluate"}
# Those whose rules go beyond their parser.
READERS: dict[str, Callable[[Words], Any]] = {
    "audit": audit._parse,
    "benchmarks.__main__": benchmarks.main,
    "evaluate": evaluation._parse,
    "inspect": inspect._parse,
    "prepare": parse,
    "score": score.parse_score,
    "train": parse,
}


class Found(BaseException):
    """A parser, before it reads a command line."""


@cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command of `vocagnolm`, or of a module with a `main`."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Found(parser)

    if READERS.get(name) is parse:
        return make_parser()
    if name == "accelerate":
        return launch_command_parser()
    module = importlib.import_module(COMMANDS[name][0] if name in COMMANDS else name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        patched.setattr("signal.signal", lambda *_: None)
        with pytest.raises(Found) as found:
            module.main()
    parser: argparse.ArgumentParser = found.value.args[0]
    return parser


def program_of(words: Words) -> tuple[str, Words]:
    """Return the command or module that a line starts, and what it reads of the line.

    Raises:
        Exception: there is no such file, module, command or option of the launcher.
    """
    first, *rest = words
    if first in SCRIPTS:
        return SCRIPTS[first], rest
    if first == "vocagnolm":
        if rest[0] in ("--help", "--version"):
            return "the table of commands", []
        assert rest[0] in COMMANDS
        return rest[0], rest[1:]
    if first == "accelerate":
        assert rest[0] == "launch"
        if not re.search(r"\.py\b| -m ", " ".join(rest)):
            return first, rest
        given = launch_command_parser().parse_args(rest[1:])
        assert given.config_file is None or Path(given.config_file).is_file()
        module = ["-m"] if given.module else []
        return program_of(["python", *module, given.training_script, *given.training_script_args])
    if first == "sbatch":
        at = rest.index("accelerate_configs/slurm.sh")
        return "train", rest[at + 1 :]
    assert first == "python"
    if rest[0] != "-m":
        assert Path(rest[0]).is_file()
        name = Path(rest[0]).stem
        return program_of(rest) if rest[0] in SCRIPTS else (name, rest[1:])
    name, argv = rest[1], rest[2:]
    if name == "vocagnolm.cli":
        return program_of(["vocagnolm", *argv])
    assert importlib.util.find_spec(name)
    return (f"{name}.__main__" if f"{name}.__main__" in MODULES else name), argv


def read(words: Words, *, whole: bool = True) -> None:
    """Read a line as its program does; if it is not the whole of it, look for its options only.

    Raises:
        Exception: it is wrong.
    """
    if (first := words[0]) == "make":
        rules = re.findall(r"^([\w -]+):", Path("Makefile").read_text(), flags=re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(" ".join(rules).split())
    elif first == "pip":
        extras = Path("pyproject.toml").read_text().partition("[project.optional-dep")[2]
        for name in re.findall(r"(?:\.|vocagnolm)\[(\w+)\]", " ".join(words)):
            assert re.search(rf"^{name} = \[", extras, flags=re.MULTILINE), name
    elif first == "pytest":
        source = Path(words[1]).read_text(encoding="utf-8")
        assert all(name in source for name in words[2:] if name != "-k")
    elif not OTHERS.keys() & {first, *words[2:3]}:
        name, argv = program_of(words)
        if name not in {"accelerate", *COMMANDS, *MODULES}:
            assert not [word for word in argv if word.startswith("-")]
        elif whole:
            (READERS.get(name) or parser_of(name).parse_args)(argv)
        else:
            options = {word.partition("=")[0] for word in argv if word.startswith("--")}
            assert options <= {*parser_of(name)._option_string_actions, *NOT_PARSED}


def words_of(line: str) -> Words:
    """Split a line into words, without a prompt, a comment and the environment."""
    words = shlex.split(line.replace("RANK", "0"), comments=True)
    while words and re.match(r"\$$|[A-Z_]+=", words[0]):
        del words[0]
    return words


def typed_commands() -> list[Any]:
    """Return the words of each line to type, from code blocks without a language."""
    found = []
    for page, text in PAGES.items():
        blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        blocks += re.findall(r"(?:^ {4}make .*\n)+", text, flags=re.MULTILINE)
        for block in blocks:
            lines = re.sub(r"\\\n\s*", "", block).splitlines()
            is_script = re.match(rf"\s*([A-Z]+=\S+ )?({PROGRAMS}) ", lines[0])
            found += [
                pytest.param(words_of(line), id=f"{page}: {line.strip()[:90]}")
                for line in lines
                if line.strip() and (is_script or line.startswith("$ "))
            ]
    return found


def named_commands() -> list[Any]:
    """Return the words of each command in a sentence, which may lack what it needs."""
    starts = re.compile(rf"([A-Z_]+=\S+ )*({PROGRAMS}) \S")
    spans = ((page, span) for page, text in PROSE.items() for span in SPAN.findall(text))
    return [
        pytest.param(words_of(span), id=f"{page}: {span[:90]}")
        for page, span in dict.fromkeys(spans)
        if starts.match(span) and span != MESSAGE
    ]


@pytest.fixture(autouse=True)
def checkout_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in a place like the checkout, with the directories that pages name."""
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "DATA").mkdir()
    (tmp_path / "PROMPTS/cot").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmarks, "_measure", lambda *_: None)


@pytest.mark.parametrize("words", typed_commands())
def test_command_to_type_is_taken(words: Words) -> None:
    read(words)


@pytest.mark.parametrize("words", named_commands())
def test_command_in_a_sentence_exists(words: Words) -> None:
    read(words, whole=False)


def test_options_in_sentences_exist() -> None:
    known = set(NOT_PARSED)
    for name in ("accelerate", *COMMANDS, *MODULES):
        known |= {*parser_of(name)._option_string_actions}
    spans = {(page, span) for page, text in PROSE.items() for span in SPAN.findall(text)}
    found = {
        (page, name)
        for page, span in spans
        if not span.startswith("pip ")
        for name in re.findall(r"--[a-z]\w*", span)
    }
    assert {each for each in found if each[1] not in known} == set()


@pytest.mark.parametrize(
    "wrong",
    [
        "vocagnolm train --teecher T",
        "vocagnolm trian",
        "accelerate launch --config_file accelerate_configs/none.yaml train.py --method cpt",
        "accelerate launch --nosuch train.py --method cpt",
        "python train.py --method nosuch",
        "python evaluate_math.py --model M --engine none",
        "python -m benchmarks nosuch",
        "python -m benchmarks.experiments.nosuch",
        "python docs/images/nosuch.py",
        "make nosuch",
        "pip install -e .[nosuch]",
        "pytest tests/nosuch.py",
        "nosuch",
    ],
)
def test_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        read(words_of(wrong))
