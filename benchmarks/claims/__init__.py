"""The claims, by the measurement that gives their numbers.

A module is a measurement. It has the `CLAIMS`, the size `FULL` that they are about, the size `TINY`
that only shows that the code runs, and `measure(size)`, which returns a value for each claim.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = (
    "trl alignment token_losses head preparation steps evaluation grading processes real "
    "real_evaluation gpu"
).split()


def load() -> dict[str, ModuleType]:
    """Import all measurements, and return them by name."""
    return {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
