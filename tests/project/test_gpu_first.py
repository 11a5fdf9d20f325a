"""The first run on a GPU: its lines on a CPU, and with stand-ins what only a GPU would meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from benchmarks import harness
from benchmarks.gpu_first import __main__ as gpu_first
from benchmarks.gpu_first import equality, kernels, steps
from benchmarks.gpu_first.__main__ import STAGES
from benchmarks.gpu_first.equality import METHODS
from benchmarks.gpu_first.report import Report
from vocagnolm.models.layers import compile_layers

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
        for name in ("the same run again", "resumed from step 2", "with --overlap_teacher"):
            line = said[stage, f"{name}: largest difference of a weight"]
            assert (line["value"], line["logs_equal"]) == (0.0, True)
    assert said["training", "a step with a NaN: steps skipped"]["value"] == 1
    assert said["fsdp2", "exit status"]["value"] == 0
    for way in ("CPT step", "stored step", "teacher forward", "online step"):
        assert said["speed", way]["tokens_per_s"] > 0
        assert said["speed", way]["planned_gib"] > 0
    shares = [x for key, x in said["speed", "phases of an online step"].items() if "_time_" in key]
    assert sum(shares) == pytest.approx(1)
    assert said["speed", "torch_varlen: numbers"]["loss"] == pytest.approx(0, abs=1e-3)
    assert said["speed", "fp8 teacher, both compiled: skipped"]["value"] == "no CUDA"
    assert said["scoring", "scoring: tokens per s"]["value"] > 0


def test_trial_tells_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, True, 1, False, tmp_path, stage="here")
    with report.trial("one"):
        raise ValueError("no good")
    with report.trial("two"):
        raise torch.OutOfMemoryError("too much")
    lines = [json.loads(line) for line in (tmp_path / "gpu_first.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["one: FAILED", "two: out of memory"]
    assert (lines[0]["value"], lines[0]["stage"]) == ("ValueError: no good", "here")
    assert "no good" in capsys.readouterr().out.splitlines()[0]


def test_lost_device_leaves_the_rest_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def lose() -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(gpu_first, "free_memory", lose)
    monkeypatch.setattr(gpu_first.os, "execv", lambda _, argv: given.append(argv[3:]))
    monkeypatch.setitem(gpu_first.STAGES, "machine", lambda report: None)
    options = ["--scale", "tiny", "--output_dir", str(tmp_path)]
    assert gpu_first.main([*options, "--stages", "machine,scoring"]) == 0
    pairs = dict(zip(given[0][::2], given[0][1::2], strict=True))
    assert (pairs["--scale"], pairs["--stages"]) == ("tiny", "scoring")
    assert 0 < float(pairs["--minutes"]) <= 9


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


def fake_liger(model: Any, **options: bool) -> None:
    """Patch what Liger does: a function of the family, and the forward of layers."""
    own = modeling_llama.apply_rotary_pos_emb
    modeling_llama.apply_rotary_pos_emb = lambda *args, **kwargs: own(*args, **kwargs)
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "LlamaMLP"):
            module.forward = type(module).forward.__get__(module)


@pytest.fixture
def optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packages of kernels that need a GPU."""
    modules = {"liger_kernel.transformers": ModuleType("liger"), "torchao": ModuleType("torchao")}
    modules |= {"liger_kernel": ModuleType("liger"), "torchao.quantization": ModuleType("ao")}
    modules["liger_kernel.transformers"].apply_liger_kernel_to_llama = fake_liger
    modules["torchao.quantization"].quantize_ = lambda model, config, filter_fn: None
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "fp8_products", lambda: None)


@pytest.mark.slow
@pytest.mark.usefixtures("optional_packages")
def test_kernels_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(tmp_path, True, 5, False, tmp_path)
    made = steps.Steps(steps.Size.tiny(), report)
    before = kernels._numbers(made)
    monkeypatch.setattr(kernels, "has_cuda", lambda: True)
    # Inductor takes minutes.
    eager = {"backend": "eager"}
    monkeypatch.setattr(kernels, "compile_layers", lambda x, **_: compile_layers(x, **eager))
    tried = set()
    for kernel in kernels.kernels():
        try:
            switch = kernel.make(made)
        except harness.Skipped:
            continue
        tried.add(kernel.name)
        for is_on in (True, False):
            switch(is_on)
            losses, loss, norm = kernels._numbers(made)
            torch.testing.assert_close(losses, before[0], rtol=0, atol=1e-2)
            assert (loss, norm) == pytest.approx(before[1:], rel=1e-3)
        assert torch.equal(losses, before[0]), kernel.name
    assert {"Liger in the student", "fp8 teacher, both compiled", "compiled layers"} <= tried
