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


@pytest.fixture(scope="module")
def first_gpu_run(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """The lines of `benchmarks.gpu_first`, where `datasets` is not installed."""
    out = tmp_path_factory.mktemp("gpu_first")
    without = "import sys, runpy; sys.modules['datasets'] = None; sys.argv[0] = 'gpu_first'; "
    without += "runpy.run_module('benchmarks.gpu_first', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", without, "--scale", "tiny", "--output_dir", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (out / "gpu_first.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.processes
def test_first_gpu_run_passes_on_a_cpu(first_gpu_run: list[dict[str, object]]) -> None:
    said = {(line["stage"], line["what"]): line for line in first_gpu_run}
    assert not [line for line in first_gpu_run if "FAILED" in str(line["what"])]
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


@pytest.fixture
def sync_modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modes of CUDA that are set, on a machine that seems to have it."""
    modes: list[str] = []
    monkeypatch.setattr(equality, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_known_wait_of_transformers_is_let_through(sync_modes: list[str]) -> None:
    asks = masking_utils.find_packed_sequence_indices
    with equality._where_waits_are("error"):
        assert masking_utils.find_packed_sequence_indices(torch.arange(4)[None]) is None
    assert sync_modes == ["error", "default", "error", "default"]
    assert masking_utils.find_packed_sequence_indices is asks


@pytest.mark.usefixtures("sync_modes")
def test_lines_that_wait_are_counted() -> None:
    def run() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another matter", stacklevel=1)

    found = equality._waiting_lines(run)
    assert found.total() == 2
    (line,) = found
    assert line.startswith("project/test_gpu_first.py:")


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
