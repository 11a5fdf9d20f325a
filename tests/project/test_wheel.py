"""The sdist has what its tests need, and the page of its wheel has no dead links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = (".*", "build", "dist", "runs", "wandb", "*.egg-info", "__pycache__")
# MANIFEST.in leaves out these megabytes, which only an experiment reads.
LEFT_OUT = {"benchmarks/experiments/real_losses.tar.xz"}
BUILD = "import sys; from setuptools import build_meta as b; b.build_{}(sys.argv[1])"


def run(*argv: str | Path, cwd: Path) -> None:
    words = [sys.executable, *map(str, argv)]
    found = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert found.returncode == 0, f"{' '.join(words)}\n{found.stdout}\n{found.stderr}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the checkout, unpacked."""
    root = tmp_path_factory.mktemp("sdist")
    copy = root / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE), symlinks=True)
    run("-c", BUILD.format("sdist"), root, cwd=copy)
    (archive,) = root.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(root, filter="data")
    return root / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the sdist, unpacked."""
    root = tmp_path_factory.mktemp("wheel")
    run("-c", BUILD.format("wheel"), root, cwd=source)
    (wheel,) = root.glob("*.whl")
    with ZipFile(wheel) as file:
        file.extractall(root)
    return root


def test_sdist_holds_every_tracked_file(source: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith(".")}
    assert {name for name in tracked if not (source / name).exists()} == LEFT_OUT


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
