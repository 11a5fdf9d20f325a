"""Pretrained models, from the directory that VOCAGNOLM_TEST_MODELS names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PLACE = os.environ.get("VOCAGNOLM_TEST_MODELS", "")
SMOLLM2 = "smollm2-135m"
GEMMA = "gemma-3-270m"
QWEN = "qwen2.5-coder-1.5b"
# Student and teacher.
PAIRS = [(SMOLLM2, GEMMA), (SMOLLM2, QWEN), (GEMMA, QWEN)]


def real_model(name: str) -> Path:
    """Return the directory of a pretrained model, or skip the test."""
    path = Path(_PLACE, name)
    if not _PLACE or not (path / "model.safetensors").exists():
        pytest.skip(f"set VOCAGNOLM_TEST_MODELS to a directory that has {name}")
    return path
