"""Processes over NCCL, each with a GPU, make the update of one process alone.

On one GPU it is FSDP2 in a single process, which sends messages to itself through NCCL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu_run
import pytest
import torch

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = [("fsdp", 1), *([("ddp", 2), ("fsdp", 2)] if torch.cuda.device_count() > 1 else [])]
# The host's name may have no address.
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> gpu_run.Run:
    options = {"gradient_accumulation_steps": 4, **gpu_run.PLAIN}
    return gpu_run.train(tmp_path_factory.mktemp("alone"), **options)


@pytest.mark.parametrize(("layout", "processes"), LAYOUTS)
def test_update_is_that_of_one_process(
    layout: str, processes: int, alone: gpu_run.Run, tmp_path: Path
) -> None:
    launcher = ["torch.distributed.run", "--standalone", "--local_addr=127.0.0.1"]
    launcher.append(f"--nproc_per_node={processes}")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, gpu_run.__file__, str(tmp_path), layout],
        env={**os.environ, **LOCAL},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    weights, log, _ = torch.load(tmp_path / "run.pt", weights_only=True)
    assert gpu_run.distance(weights, alone.weights) < 1e-3 * alone.way
    for entry, expected in zip(log, alone.log, strict=True):
        assert entry == pytest.approx(expected, rel=1e-3)
