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
    if name not in ("prepare_dataset", "VocAgnoConfig"):  # all steps and options at once
        assert found.__module__.count(".") == 1, "not of a flat file"
    assert name in dir(vocagnolm)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vocagnolm' has no attribute 'absent'"):
        vocagnolm.absent  # noqa: B018
