"""A teacher that is sharded inside each machine says what a whole one says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROCESSES = 4


def test_sharded_teacher_gives_the_same_losses_when_machines_hold_it_together(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    for name, tied in (("plain", False), ("tied", True)):
        tiny_llama(64, tie_word_embeddings=tied).save_pretrained(tmp_path / name)
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc_per_node={PROCESSES}", str(here / "sharding_worker.py"), tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    for rank in range(PROCESSES):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert found["same"], found
            shards = PROCESSES // found["machines"]  # of each machine
            assert found["share"] == pytest.approx(1 / shards, rel=0.1), found
