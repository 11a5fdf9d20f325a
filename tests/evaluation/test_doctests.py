"""The examples in the docstrings of the evaluation."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "accuracy answers engines.generation grading.equality grading.extraction "
    "grading.normalization grading.reading tasks.questions"
)


@pytest.mark.parametrize("name", MODULES.split())
def test_examples_of_the_docstrings_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"vocagnolm.evaluation.{name}"))
    assert results.attempted > 0
    assert results.failed == 0
