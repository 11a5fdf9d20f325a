"""A finished run stays as it was written: what is damaged later is said, and written again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.run import main as train
from vocagnolm.run.export import export


@pytest.fixture(scope="module")
def finished(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[str], Path]:
    root = tmp_path_factory.mktemp("finished")
    shutil.copytree(tokenizer_dirs["metaspace"], root / "student")
    tiny_llama(700).save_pretrained(root / "student")
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:20])
    (root / "pages.jsonl").write_text("".join(lines))
    argv = [
        *("--method=cpt", f"--student={root / 'student'}", f"--dataset={root / 'pages.jsonl'}"),
        *("--max_length=64", "--global_batch_tokens=128", "--max_steps=1", "--use_cpu"),
        "--report_to=none",
    ]
    assert train.main([*argv, f"--output_dir={root / 'run'}"]) == 0
    return argv, root / "run"


def files(run: Path) -> dict[str, bytes]:
    """The files of a final model."""
    names = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json")
    return {name: (run / name).read_bytes() for name in (*names, "tokenizer_config.json")}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def brace(path: Path) -> None:
    path.write_text("{")


DAMAGES = {
    "flipped weights": ("model.safetensors", flip, "does not match its checksum"),
    "cut weights": ("model.safetensors", cut, "bytes instead of"),
    "no weights": ("model.safetensors", Path.unlink, "is missing"),
    "brace for a configuration": ("config.json", brace, "has 1 bytes instead of"),
    "no configuration": ("config.json", Path.unlink, "is missing"),
    "no settings of generation": ("generation_config.json", Path.unlink, "is missing"),
    "no tokenizer": ("tokenizer.json", Path.unlink, "is missing"),
    "flipped tokenizer": ("tokenizer.json", flip, "does not match its checksum"),
    "no settings of the tokenizer": ("tokenizer_config.json", Path.unlink, "is missing"),
    "empty state": ("trainer_state.json", empty, "has 0 bytes instead of"),
    "no state": ("trainer_state.json", Path.unlink, "is missing"),
    "cut manifest": ("manifest.json", cut, "is damaged"),
    "flipped manifest": ("manifest.json", flip, "is damaged"),
}


@pytest.mark.slow
@pytest.mark.stress(
    "finished runs: every kind of damage to the final model", "said, and written again, bit for bit"
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_model_is_said_and_written_again(
    damage: str,
    finished: tuple[list[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (argv, source), (name, harm, fault) = finished, DAMAGES[damage]
    run = Path(shutil.copytree(source, tmp_path / "run"))
    harm(run / name)
    argv = [*argv, f"--output_dir={run}"]
    capfd.readouterr()
    assert train.main(argv) == 0
    said = capfd.readouterr().out.splitlines()[0]
    assert said.startswith(f"{run} holds a finished run, but {name} "), said
    assert fault in said
    assert said.endswith(": writing it again from the newest checkpoint")
    assert files(run) == files(source)
    assert train.main(argv) == 0
    assert capfd.readouterr().out.endswith("nothing to do\n")


def test_damaged_model_without_a_checkpoint_is_refused(
    finished: tuple[list[str], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv, source = finished
    run = Path(shutil.copytree(source, tmp_path / "run"))
    shutil.rmtree(run / "checkpoint-1")
    (run / "tokenizer.json").unlink()
    capfd.readouterr()
    assert train.main([*argv, f"--output_dir={run}"]) == 2
    assert capfd.readouterr().err == (
        f"train.py: error: {run} holds a finished run, but tokenizer.json is missing, and no "
        "checkpoint to write it again from: give another --output_dir\n"
    )


def add_files(run: Path) -> None:
    (run / "train.log").write_text("mine")
    (run / "README.md").write_text("a better card")
    (run / "evaluation").mkdir()


def take_manifest(run: Path) -> None:
    """Leave a run as it ended before final models had one."""
    (run / "manifest.json").unlink()


@pytest.mark.parametrize("change", [add_files, take_manifest])
def test_run_stays_finished(
    change: Callable[[Path], None],
    finished: tuple[list[str], Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv, source = finished
    run = Path(shutil.copytree(source, tmp_path / "run"))
    change(run)
    capfd.readouterr()
    assert train.main([*argv, f"--output_dir={run}"]) == 0
    assert capfd.readouterr().out.endswith("nothing to do\n")


def test_export_refuses_a_damaged_final_model(
    finished: tuple[list[str], Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished[1], tmp_path / "run"))
    flip(run / "model.safetensors")
    with pytest.raises(ValueError, match=r"run: model.safetensors does not match its checksum"):
        export(run, tmp_path / "whole")
