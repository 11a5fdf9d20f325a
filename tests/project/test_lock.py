"""Dependencies: bounded where their private parts are used, and locked where we run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch.distributed import distributed_c10d
from transformers import PreTrainedConfig, PreTrainedModel, Trainer

from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.resumable import _OVERRIDDEN, ResumableTrainer

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


@pytest.mark.parametrize("section", ["dependencies", "dev"])
def test_lock_has_every_dependency(section: str) -> None:
    versions = locked()
    for requirement in declared(section):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert versions[name] in requirement.specifier, f"{requirement}: make lock"


def test_lock_names_no_build_of_a_machine() -> None:
    assert all(version.local is None for version in locked().values())
    assert len(locked()) > 90


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
