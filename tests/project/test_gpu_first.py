"""The first report of speed on a GPU: its lines on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_first.__main__ import STAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.processes
def test_gpu_first_passes_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_first", "--scale=tiny", f"--output_dir={tmp_path}"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(x) for x in (tmp_path / "gpu_first.jsonl").read_text().splitlines()]
    said = {(line["stage"], line["what"]): line for line in lines}
    assert not [line for line in lines if "FAILED" in str(line["what"])]
    assert {stage for stage, what in said if what == "done"} == {*STAGES}
    for way in ("CPT step", "stored step", "teacher forward", "online step"):
        assert said["speed", way]["tokens_per_s"] > 0
        assert said["speed", way]["planned_gib"] > 0
    assert said["speed", "torch_varlen: numbers"]["loss"] == pytest.approx(0, abs=1e-3)
    assert said["speed", "fp8 teacher: skipped"]["value"] == "no CUDA"
    assert said["scoring", "scoring: tokens per s"]["value"] > 0
