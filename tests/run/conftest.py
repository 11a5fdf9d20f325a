"""Models and pages that the tests of `train.py` share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from adapter_world import World, make_world


@pytest.fixture(scope="module")
def world(
    tokenizer_dirs: dict[str, Path],
    tiny_llama: Callable[..., Any],
    training_texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> World:
    """A world of 60 pages."""
    root = tmp_path_factory.mktemp("world")
    return make_world(root, tiny_llama, tokenizer_dirs, training_texts[:60])
