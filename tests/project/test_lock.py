"""Dependencies: bounded where their private parts are used, and locked where we run them."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch.distributed import distributed_c10d
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from vocagnolm.run.resumable import _OVERRIDDEN, ResumableTrainer
from vocagnolm.trainer import VocAgnoTrainer

ROOT = Path(__file__).resolve().parents[2]
# Those of whose private names the package overrides or reads some.
BOUNDED = ("torch", "transformers", "accelerate")


def declared(section: str) -> list[Requirement]:
    """The requirements in a list of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    (block,) = re.findall(rf"^{section} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return [Requirement(line) for line in re.findall(r'^ +"([^"]+)"', block, re.MULTILINE)]


def locked() -> dict[str, Version]:
    """The version of every package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {each.name: Version(next(iter(each.specifier)).version) for each in found}


@pytest.mark.parametrize("name", BOUNDED)
def test_private_parts_have_an_upper_bound(name: str) -> None:
    (found,) = (each for each in declared("dependencies") if each.name == name)
    bounds = {specifier.operator for specifier in found.specifier}
    assert bounds == {">=", "<"}, f"{found}: the next major version may be another"


@pytest.mark.parametrize("section", ["dependencies", "eval", "dev"])
def test_lock_has_every_dependency(section: str) -> None:
    versions = locked()
    for requirement in declared(section):
        if requirement.name == "vocagnolm":
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert versions[name] in requirement.specifier, f"{requirement}: make lock"


def test_lock_names_no_build_of_a_machine() -> None:
    assert all(version.local is None for version in locked().values())
    assert len(locked()) > 90


def test_training_leaves_antlr_to_others() -> None:
    todo, seen = [each.name for each in declared("dependencies")], set()
    while todo:
        if (name := todo.pop().lower()) not in seen:
            seen.add(name)
            with suppress(metadata.PackageNotFoundError):
                lines = map(Requirement, metadata.requires(name) or ())
                todo += [each.name for each in lines if not each.marker or each.marker.evaluate()]
    assert "huggingface-hub" in seen
    assert {name for name in seen if "antlr4" in name} == set()


@pytest.mark.processes
@pytest.mark.parametrize("argv", [("evaluate", "--model", "m"), ("demo", "--output_dir", "/no")])
@pytest.mark.parametrize("found", ["none", "4.9.3"])
def test_missing_extra_is_one_line(argv: tuple[str, ...], found: str) -> None:
    code = f"""
import sys
from importlib import metadata
real, line = metadata.version, "antlr4-python3-runtime==4.11.*; extra == 'eval'"
metadata.requires = lambda name: [line]
def version(name):
    if name != "antlr4-python3-runtime":
        return real(name)
    if {found!r} == "none":
        raise metadata.PackageNotFoundError(name)
    return {found!r}
metadata.version = version
from vocagnolm.cli import main
sys.exit(main({argv!r}))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = (
        f"vocagnolm {argv[0]}: error: expected antlr4-python3-runtime ==4.11.*, found {found}: "
        "pip install 'vocagnolm[eval]'\n"
    )
    assert (run.returncode, run.stdout, run.stderr) == (2, "", expected)


def overridden() -> set[str]:
    """The private names of Trainer that our trainers define anew."""
    ours = {name for kind in (VocAgnoTrainer, ResumableTrainer) for name in vars(kind)}
    inherited = {name for kind in Trainer.__mro__ for name in vars(kind)}
    return {name for name in ours & inherited if re.match(r"_[a-z]", name)}


def test_overridden_names_are_those_checked_at_the_start() -> None:
    assert overridden() == set(_OVERRIDDEN)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        *((Trainer, name) for name in (*_OVERRIDDEN, "_inner_training_loop")),
        (PreTrainedModel, "_no_split_modules"),
        (PreTrainedConfig(), "_attn_implementation"),
        (distributed_c10d, "_get_default_store"),
        (torch._dynamo.config, "recompile_limit"),
    ],
)
def test_private_name_is_there(owner: Any, name: str) -> None:
    assert hasattr(owner, name)
