"""Several processes of one command are one job, whatever the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import World

from vocagnolm import __main__

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2".split()]


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_trains_one_student_without_a_gpu(world: World) -> None:
    changes = {"teacher": None, "method": "cpt", "eval_fraction": None, "logging_steps": "1"}
    argv = world.argv("run", global_batch_tokens="128", max_steps="2", **changes)
    done = subprocess.run(  # no option says that there is no GPU
        [*TORCHRUN, "train.py", *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "128 tokens = 2 processes x 1 sequence x 1 accumulation step x 64" in done.stdout
    assert done.stdout.count("train_loss ") == 1
    assert {path.stem for path in world.root.glob("run/*/metrics_*")} == {"metrics_0", "metrics_1"}


@pytest.mark.parametrize(
    "command",
    [
        "train --method=cpt --student=S --dataset=D --output_dir=O",
        "evaluate --model=M --benchmarks=demo --output_dir=O",
    ],
)
def test_command_rejects_to_be_one_of_several(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    # As on a machine with a GPU, where processes without LOCAL_RANK are not connected.
    monkeypatch.setattr("accelerate.state.get_int_from_env", lambda names, default: default)
    assert __main__.main(command.split()) == 2
    assert "this one is connected to no other: start them with torchrun" in capfd.readouterr().err
