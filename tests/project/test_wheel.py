"""The wheel has what options name, and its page has no dead links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = (".*", "build", "dist", "runs", "wandb", "*.egg-info", "__pycache__")
BUILD = "import sys; from setuptools import build_meta as b; b.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout, unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    copy = root / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE), symlinks=True)
    words = [sys.executable, "-c", BUILD, str(root)]
    found = subprocess.run(words, cwd=copy, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    (wheel,) = root.glob("*.whl")
    with ZipFile(wheel) as file:
        file.extractall(root)
    return root


@pytest.mark.parametrize("name", ["recipes", "accelerate_configs"])
def test_wheel_holds_what_options_name(wheel: Path, name: str) -> None:
    found, expected = wheel / "vocagnolm" / name, ROOT / "vocagnolm" / name
    paths = {path.relative_to(expected) for path in expected.rglob("*.*")}
    assert {path.relative_to(found) for path in found.rglob("*.*")} == paths


def test_readme_of_the_wheel_has_no_links_to_files(wheel: Path) -> None:
    (about,) = metadata.distributions(path=[str(wheel)])
    readme = about.metadata.get_payload()
    assert readme.startswith("# VocAgnoLM")
    assert re.findall(r"\]\((?!http)|src(?:set)?=\"(?!http)", readme) == []
