"""The counts of `benchmarks.elementwise` against those of a layer that are counted by hand."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import SIZES

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import json
from benchmarks.elementwise import TEACHER, count
part = count("tiny")[TEACHER]
print(json.dumps([*part, part.compiled]))
"""
TOKENS = 2 * 64


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("g++"), reason="the fake device is compiled with g++")
def test_kernels_of_a_teacher_layer_are_those_counted_by_hand() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    eager, layers, eager_layer, compiled_layer, eager_losses, compiled_losses, compiled = counts
    # Kernels, and bytes for each number of the input, in 16 bits. The statistics of norms, one
    # number a token, are left out.
    norm = {"to float32": 6, "square": 8, "mean": 4, "add": 0, "rsqrt": 0, "times rsqrt": 8}
    norm |= {"to 16 bits": 6, "times weight": 4}
    rotation = {"times cos": 4, "minus half": 2, "join halves": 4, "times sin": 4, "add": 6}
    mlp = {"silu": 4, "times": 6}
    assert eager_layer[0] == 2 * len(norm) + 2 * len(rotation) + len(mlp) + 2
    hidden, inner, _, heads, key_heads, _ = SIZES["teacher", "tiny"]
    keys = hidden * key_heads // heads
    bytes_a_token = 2 * hidden * sum(norm.values()) + (hidden + keys) * sum(rotation.values())
    bytes_a_token += inner * sum(mlp.values()) + 2 * 6 * hidden
    assert eager_layer[1] == pytest.approx(TOKENS * bytes_a_token, rel=0.03)
    # Compiled: two norms, the second one with a residual sum, two rotations, the MLP, a sum.
    assert compiled_layer[0] == 6
    assert compiled_layer[1] < eager_layer[1] / 3
    # Losses of one tile: three reads and a write of log-softmax, a gather and a sign; or one read.
    assert (eager_losses[0], compiled_losses[0]) == (3, 1)
    assert compiled_losses[1] == pytest.approx(eager_losses[1] / 4, rel=0.05)
    for n in range(2):
        saved = layers * (eager_layer[n] - compiled_layer[n]) + eager_losses[n] - compiled_losses[n]
        assert compiled[n] == eager[n] - saved
