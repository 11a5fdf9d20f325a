"""Several processes of one command are one job, whatever the machine has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.evaluation import main as evaluation
from vocagnolm.run import options as train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tokenizer_dirs: dict[str, Path], tiny_llama: Callable[..., Any], tmp_path: Path) -> Path:
    shutil.copytree(tokenizer_dirs["metaspace"], tmp_path / "model")
    tiny_llama(700).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def pages(training_texts: list[str], tmp_path: Path) -> Path:
    lines = (json.dumps({"text": text}) + "\n" for text in training_texts[:20])
    (tmp_path / "pages.jsonl").write_text("".join(lines))
    return tmp_path / "pages.jsonl"


def torchrun(*argv: object) -> subprocess.CompletedProcess[str]:
    """A command in two processes, as users start it; no option says that there is no GPU."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"),
            *map(str, argv),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_trains_one_student_without_a_gpu(model: Path, pages: Path) -> None:
    out = pages.with_name("run")
    done = torchrun(
        *("train.py", "--method=cpt", f"--student={model}", f"--dataset={pages}"),
        *("--max_length=32", "--global_batch_tokens=64", "--max_steps=2", "--logging_steps=1"),
        *("--report_to=none", f"--output_dir={out}"),
    )
    assert done.returncode == 0, done.stderr
    assert "64 tokens = 2 processes x 1 sequences x 1 accumulation steps x 32" in done.stdout
    assert done.stdout.count("train_loss ") == 1
    assert {path.name for path in out.glob("*/metrics_*")} >= {
        "metrics_0.safetensors",
        "metrics_1.safetensors",
    }


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_scores_one_store_without_a_gpu(model: Path, pages: Path) -> None:
    out = pages.with_name("store")
    done = torchrun(
        *("-m", "vocagnolm.cli", "score", f"--teacher={model}", f"--dataset={pages}"),
        *(f"--output_dir={out}", "--min_context=16", "--shard_documents=10"),
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((out / "manifest.json").read_text())["shards"]) == 2
    assert done.stdout.count("\n") == 1


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_evaluates_once_without_a_gpu(model: Path) -> None:
    out = model.with_name("evaluation")
    done = torchrun(
        *("evaluate_math.py", f"--model={model}", "--benchmarks=demo", "--limit=4"),
        f"--output_dir={out}",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written: ") == 1


COMMANDS = {
    "train.py": (train.main, ["--method=cpt", "--student=S", "--dataset=D", "--output_dir=O"]),
    "vocagnolm evaluate": (evaluation.main, ["--model=M", "--benchmarks=demo", "--output_dir=O"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_rejects_to_be_one_of_several(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    # As on a machine with a GPU, where processes without LOCAL_RANK are not connected.
    monkeypatch.setattr("accelerate.state.get_int_from_env", lambda names, default: default)
    main, argv = COMMANDS[name]
    assert main(argv) == 2
    assert capfd.readouterr().err == (
        f"{name}: error: 2 processes were started (WORLD_SIZE), but this one is connected to no "
        "other: start them with torchrun or accelerate launch, or unset WORLD_SIZE\n"
    )
