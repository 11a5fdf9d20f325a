"""constraints.txt pins what we run with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def declared(section: str) -> list[Requirement]:
    """The requirements in a list of pyproject.toml, and those of the extras that it names."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(rf"^{section} = (\[.*?\])(?: +#.*)?$", text, re.MULTILINE | re.DOTALL)
    found = []
    for line in re.findall(r'"([^"]+)"', re.sub(r"#.*", "", block)):
        requirement = Requirement(line)
        if requirement.name != "vocagnolm":
            found.append(requirement)
        for extra in sorted(requirement.extras if requirement.name == "vocagnolm" else ()):
            found += declared(extra)
    return found


@pytest.mark.parametrize("section", ["dependencies", "dev"])
def test_lock_has_every_dependency(section: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {}
    for requirement in (Requirement(line) for line in lines if not line.startswith("#")):
        locked[requirement.name] = Version(next(iter(requirement.specifier)).version)
    assert [version for version in locked.values() if version.local] == []
    for requirement in declared(section):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert locked[name] in requirement.specifier, f"{requirement}: make lock"
