"""The ten names of the package, and what loading them loads."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

import pytest

import vocagnolm

HEAVY = ("torch", "transformers", "datasets")


@pytest.mark.parametrize("name", vocagnolm.__all__)
def test_name_is_that_of_its_module(name: str) -> None:
    found = getattr(vocagnolm, name)
    assert found.__name__ == name
    assert found is getattr(importlib.import_module(found.__module__), name)
    assert found.__module__.count(".") == 1, "not of a flat file"
    assert name in dir(vocagnolm)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'vocagnolm' has no attribute 'absent'"):
        vocagnolm.absent  # noqa: B018
    assert len(vocagnolm.__all__) == 10


@pytest.mark.parametrize(
    "code",
    [
        "import vocagnolm",
        "import vocagnolm.conventions, vocagnolm.spans, vocagnolm.tokenizers, vocagnolm.alignment",
        "from vocagnolm import encode, align_spans",
    ],
)
def test_text_loads_no_torch_when_imported(code: str) -> None:
    code = f"{code}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


@pytest.mark.parametrize("module", ["spans", "alignment", "packing", "collator"])
def test_doctests_run(module: str) -> None:
    results = doctest.testmod(importlib.import_module(f"vocagnolm.{module}"))
    assert results.attempted > 0
    assert results.failed == 0
