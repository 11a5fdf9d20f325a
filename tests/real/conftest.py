"""Fixtures for tests with pretrained models, which are skipped where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_data import GEMMA, PAIRS, QWEN, SMOLLM2, real_model


@pytest.fixture(params=PAIRS, ids=[" <- ".join(names) for names in PAIRS], scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A student and a teacher of another vocabulary."""
    student, teacher = request.param
    return real_model(student), real_model(teacher)


@pytest.fixture(params=[SMOLLM2, GEMMA, QWEN], scope="module")
def model_directory(request: pytest.FixtureRequest) -> Path:
    """Each model by itself."""
    return real_model(request.param)
