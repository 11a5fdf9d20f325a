"""The names of the package."""

from __future__ import annotations

import importlib

import pytest

import vocagnolm


@pytest.mark.parametrize("name", vocagnolm.__all__)
def test_name_is_that_of_its_module(name: str) -> None:
    found = getattr(vocagnolm, name)
    assert found.__name__ == name
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert name in dir(vocagnolm)
