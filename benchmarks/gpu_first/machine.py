"""Report the machine: its versions, and the speed that its GPU reaches."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from contextlib import suppress

import torch

from benchmarks.gpu_first.report import Report, timed
from benchmarks.harness import Skipped
from benchmarks.models import has_cuda
from vocagnolm.shell.io import versions
from vocagnolm.training.throughput import peak_tflops

_PACKAGES = (
    "python torch transformers accelerate datasets tokenizers numpy triton peft liger-kernel "
    "torchao flash-attn vllm"
)
_SIDE, _BYTES, _GIB = 8192, 2**32, 2**30


def device_name() -> str:
    """Return the name of the GPU, or of what computes without one."""
    return torch.cuda.get_device_name() if has_cuda() else "CPU"


def look_at_machine(report: Report) -> None:
    """Print versions, memory, and the rates of products and copies, which bound all others.

    Raises:
        Skipped: there is no GPU.
    """
    name = device_name()
    month = datetime.date.today().strftime("%B %Y")
    report.say("machine", name, cpus=os.cpu_count(), month=month, versions=versions(_PACKAGES))
    if not has_cuda():
        raise Skipped("no CUDA: memory, products, copies")
    free, total = torch.cuda.mem_get_info()
    report.say("GPU", name, peak_tflops=peak_tflops(name), free_gib=free / _GIB, gib=total / _GIB)
    with suppress(OSError):
        shown = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False)
        sys.stdout.write(shown.stdout)
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = min(timed(lambda: [a @ b for _ in range(10)])[0] for _ in range(4)) / 10
    report.say(f"bf16 product {_SIDE}^3, TFLOP/s", 2 * _SIDE**3 / seconds / 1e12)
    x, y = (torch.empty(_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = min(timed(lambda: y.copy_(x))[0] for _ in range(4))
    report.say("copy, TB/s read and written", 2 * _BYTES / seconds / 1e12)
