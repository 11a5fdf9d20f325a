"""Several processes of one command are one job, whatever the machine has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from world import World

from vocagnolm.evaluation import evaluate as evaluation
from vocagnolm.run import parser

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*argv: object) -> subprocess.CompletedProcess[str]:
    """Run a command in two processes, as users do; no option says that there is no GPU."""
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
def test_torchrun_trains_one_student_without_a_gpu(world: World) -> None:
    out = world.root / "run"
    done = torchrun(
        *("train.py", "--method=cpt", f"--student={world.student}", f"--dataset={world.pages}"),
        *("--max_length=32", "--global_batch_tokens=64", "--max_steps=2", "--logging_steps=1"),
        *("--report_to=none", f"--output_dir={out}"),
    )
    assert done.returncode == 0, done.stderr
    assert "64 tokens = 2 processes x 1 sequence x 1 accumulation step x 32" in done.stdout
    assert done.stdout.count("train_loss ") == 1
    assert {path.name for path in out.glob("*/metrics_*")} >= {
        "metrics_0.safetensors",
        "metrics_1.safetensors",
    }


COMMANDS = {
    "vocagnolm train": (
        parser.main,
        ["--method=cpt", "--student=S", "--dataset=D", "--output_dir=O"],
    ),
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
