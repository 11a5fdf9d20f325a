"""Real tokenizers and corpora from VOCAGNOLM_TEST_DATA, for the few tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_PLACE = os.environ.get("VOCAGNOLM_TEST_DATA", "")


def real_data(name: str) -> Path:
    """Return a file or directory of the real data, or skip the test."""
    path = Path(_PLACE, name)
    if not _PLACE or not path.exists():
        pytest.skip(f"set VOCAGNOLM_TEST_DATA to a directory that has {name}")
    return path
