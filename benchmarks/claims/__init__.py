"""One file a claim: `CLAIM`, the sizes `FULL`, `SMALL` and `TINY`, and `measure(size)`.

The docstring says what is measured and how. `FULL` is the size that the claim is about; `SMALL`,
where it takes minutes, is that of `make bench`; at the size of `TINY` it only shows that it runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import torch

from benchmarks.harness import Measured, Skipped


def load() -> dict[str, ModuleType]:
    """Import every claim, by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def measure(module: ModuleType, size: object) -> Measured:
    """Measure a claim.

    Raises:
        Skipped: something that it needs is missing here.
    """
    if module.CLAIM.needs_gpu and not torch.cuda.is_available():
        raise Skipped("it needs a GPU, and there is none")
    found = module.measure(size)
    return found if isinstance(found, Measured) else Measured(float(found))
