"""The first run on a GPU: its lines on a CPU, and with stand-ins what only a GPU would meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import masking_utils

from benchmarks import harness, steps
from benchmarks.gpu_first import equality, kernels
from benchmarks.gpu_first.__main__ import STAGES
from benchmarks.gpu_first.equality import METHODS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.processes
def test_first_gpu_run_passes_on_a_cpu(tmp_path: Path) -> None:
    # Where `datasets` is not installed.
    without = "import sys, runpy; sys.modules['datasets'] = None; sys.argv[0] = 'gpu_first'; "
    without += "runpy.run_module('benchmarks.gpu_first', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", without, "--scale", "tiny", "--output_dir", str(tmp_path)],
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
    assert {stage for stage, what in said if what == "done"} == {*STAGES, "fsdp2"}
    for name in METHODS:
        assert said["equality", f"{name}, cpu bf16 to cpu float32"]["gradient"] < 0.5
    for stage in ("training", "fsdp2"):
        for name in ("the same run again", "resumed from step 2"):
            line = said[stage, f"{name}: largest difference of a weight"]
            assert (line["value"], line["logs_equal"]) == (0.0, True)
    assert said["training", "a step with a NaN: steps skipped"]["value"] == 1
    assert said["fsdp2", "exit status"]["value"] == 0
    for way in ("CPT step", "stored step", "teacher forward", "online step"):
        assert said["speed", way]["tokens_per_s"] > 0
        assert said["speed", way]["planned_gib"] > 0
    assert said["speed", "torch_varlen: numbers"]["loss"] == pytest.approx(0, abs=1e-3)
    assert said["speed", "fp8 teacher: skipped"]["value"] == "no CUDA"
    assert said["scoring", "scoring: tokens per s"]["value"] > 0


def test_waits_are_counted_beside_the_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(equality, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with equality._where_waits_are("error"):
        assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None
    assert modes == ["error", "default", "error", "default"]

    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another matter", stacklevel=1)

    found = equality._waiting_lines(run)
    assert found.total() == 2
    assert next(iter(found)).startswith("project/test_gpu_first.py:")


@pytest.mark.slow
def test_kernels_leave_nothing_behind(tmp_path: Path) -> None:
    made = steps.Steps(steps.Size.tiny(), str(tmp_path))
    before = kernels._numbers(made)
    tried = set()
    for name, make, _ in kernels.KERNELS:
        try:
            switch = make(made)
        except harness.Skipped:
            continue
        tried.add(name)
        for is_on in (True, False):
            switch(is_on)
            losses, loss, norm = kernels._numbers(made)
            torch.testing.assert_close(losses, before[0], rtol=0, atol=1e-2)
            assert (loss, norm) == pytest.approx(before[1:], rel=1e-3)
        assert torch.equal(losses, before[0]), name
    assert {"gradient checkpointing", "torch_varlen", "compiled student"} <= tried
