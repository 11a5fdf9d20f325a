"""constraints.txt pins what we run with, and training alone needs no antlr4."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def declared(section: str) -> list[Requirement]:
    """The requirements in a list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(rf"^{section} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return [Requirement(line) for line in re.findall(r'^ +"([^"]+)"', block, re.MULTILINE)]


@pytest.mark.parametrize("section", ["dependencies", "eval", "dev"])
def test_lock_has_every_dependency(section: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {}
    for requirement in (Requirement(line) for line in lines if not line.startswith("#")):
        locked[requirement.name] = Version(next(iter(requirement.specifier)).version)
    assert [version for version in locked.values() if version.local] == []
    for requirement in declared(section):
        if requirement.name != "vocagnolm":
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert locked[name] in requirement.specifier, f"{requirement}: make lock"


def test_training_needs_no_antlr() -> None:
    # hydra-core and omegaconf want another antlr4 than the evaluation.
    todo, seen = [each.name for each in declared("dependencies")], set()
    while todo:
        if (name := todo.pop().lower()) not in seen:
            seen.add(name)
            with suppress(metadata.PackageNotFoundError):
                lines = map(Requirement, metadata.requires(name) or ())
                todo += [each.name for each in lines if not each.marker or each.marker.evaluate()]
    assert "huggingface-hub" in seen
    assert {name for name in seen if "antlr4" in name} == set()
