"""The claims, by the measurement that gives their numbers.

A module is a measurement: `CLAIMS`, the size `FULL` that they are about, the size `TINY` at which
it only shows that it runs, and `measure(size)`, which returns a value for each claim.
"""

from __future__ import annotations

import importlib
from types import ModuleType

NAMES = (
    "trl alignment token_losses head preparation steps evaluation grading processes real "
    "real_evaluation gpu"
).split()


def load() -> dict[str, ModuleType]:
    """Import every measurement, by its name."""
    return {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
