"""What `auto` means on each kind of device, and the words that say why."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from processors import pretend

from vocagnolm.models.load import choose_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")
WITH, WITHOUT = "AVX512_BF16", None


@pytest.mark.parametrize("kernels", ["DEFAULT", "AVX2"])
def test_unit_is_not_used_when_pytorch_computes_with_narrower_kernels(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "AMX")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: kernels)
    assert choose_dtype("auto", CPU)[0] == "float32"


def test_environment_can_hide_the_unit_from_another_process() -> None:
    """Tests rely on this where a processor has the unit."""
    code = (
        "import torch; from vocagnolm.models.load import choose_dtype; "
        "print(choose_dtype('auto', torch.device('cpu'))[0])"
    )
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "float32"


@pytest.mark.parametrize(
    ("choice", "device", "unit", "begun", "expected", "reason"),
    [
        ("auto", CPU, WITH, None, "bfloat16", "the processor multiplies in it, with AVX512_BF16"),
        ("auto", CPU, "AMX", None, "bfloat16", "the processor multiplies in it, with AMX"),
        ("auto", CPU, WITHOUT, None, "float32", "the processor has no products in bfloat16"),
        ("auto", GPU, WITHOUT, None, "bfloat16", "the default on a GPU"),
        ("auto", CPU, WITH, "float32", "float32", "as it began"),
        ("auto", CPU, WITHOUT, "bfloat16", "bfloat16", "as it began, and slow: the processor has"),
        ("auto", GPU, WITHOUT, "float32", "float32", "as it began"),
        ("float32", CPU, WITH, "bfloat16", "float32", "as asked for"),
        ("bfloat16", CPU, WITH, "float32", "bfloat16", "as asked for"),
        ("bfloat16", CPU, WITHOUT, None, "bfloat16", "as asked for, and slow: the processor has"),
        ("bfloat16", GPU, WITHOUT, None, "bfloat16", "as asked for"),
    ],
)
def test_dtype_is_the_fast_one_unless_asked_for_or_begun_otherwise(
    choice: str,
    device: torch.device,
    unit: str | None,
    begun: str | None,
    expected: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, unit)
    dtype, why = choose_dtype(choice, device, begun)
    assert (dtype, why[: len(reason)]) == (expected, reason)
    assert ("slow" in why) == ("slow" in reason)
