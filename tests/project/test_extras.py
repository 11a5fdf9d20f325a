"""Without its package, an option fails before any work, in one line that names the extra."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.evaluation import evaluate as evaluation
from vocagnolm.run import launch, parser
from vocagnolm.shell import extras
from vocagnolm.training import job
from vocagnolm.training.config import VocAgnoConfig
from vocagnolm.training.options import DataOptions, ModelOptions

ROOT = Path(__file__).resolve().parents[2]


def launched(**given: Any) -> None:
    """Run the checks that the command and the trainer share."""
    args = VocAgnoConfig(output_dir="o", use_cpu=True, method="cpt", **given)
    job.check_launch(job.Job(ModelOptions(), DataOptions(), args), evaluates=False)


VLLM = ["--model=m", "--engine=vllm"]


@pytest.mark.parametrize(
    ("package", "ask"),
    [
        ("peft", lambda: parser.check(["--method", "cpt", "--use_peft"])),
        ("torchao", lambda: launched(teacher_quantization="fp8")),
        ("bitsandbytes", lambda: launched(teacher_quantization="nf4")),
        ("vllm", lambda: evaluation.check(VLLM)),
        (
            "vllm",
            lambda: launch.launch("evaluate", ["--accelerate_config=ddp", *VLLM], evaluation.check),
        ),
    ],
)
def test_option_names_the_extra_when_its_package_is_missing(
    package: str, ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = (package, "kernels")
    monkeypatch.setattr(extras, "is_installed", lambda name: name not in missing)
    with pytest.raises(ValueError, match=re.escape(f'"vocagnolm[{extras.EXTRAS[package]}]"')):
        ask()


def test_plan_is_made_where_packages_of_the_run_are_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda name: False)
    launched(dry_run=True, teacher_quantization="nf4", optim="adamw_8bit", use_liger_kernel=True)


def test_package_is_missing_when_only_a_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights & Biases leaves a directory `wandb` where a run began."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not extras.is_installed("no_such_package")
    assert not extras.is_installed("no_such_package.part")
    assert extras.is_installed("vocagnolm")


def test_every_extra_is_declared_with_its_packages() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, extra in extras.EXTRAS.items():
        (names,) = re.findall(rf"^{extra} = \[(.*?)\]", text, re.MULTILINE)
        assert f'"{package.replace("_", "-")}' in names


def test_newest_transformers_is_the_locked_one() -> None:
    locked = re.search(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert locked
    assert locked[1] == extras.NEWEST_TRANSFORMERS
