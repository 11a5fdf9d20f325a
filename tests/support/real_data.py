"""Real tokenizers and corpora, and pretrained models, for the few tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2 = "smollm2-135m"
GEMMA = "gemma-3-270m"
QWEN = "qwen2.5-coder-1.5b"
# Student and teacher.
PAIRS = [(SMOLLM2, GEMMA), (SMOLLM2, QWEN), (GEMMA, QWEN)]


def real_data(name: str, variable: str = "VOCAGNOLM_TEST_DATA") -> Path:
    """Return a file or directory below the one that a variable names, or skip the test."""
    place = os.environ.get(variable, "")
    path = Path(place, name)
    if not place or not path.exists():
        pytest.skip(f"set {variable} to a directory that has {name}")
    return path


def real_model(name: str) -> Path:
    """Return the directory of a pretrained model, or skip the test."""
    return real_data(f"{name}/model.safetensors", "VOCAGNOLM_TEST_MODELS").parent
