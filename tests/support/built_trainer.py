"""The trainer of a command line, as `train.py` makes it."""

from __future__ import annotations

from collections.abc import Sequence

from vocagnolm.run.parser import parse
from vocagnolm.trainer import VocAgnoTrainer
from vocagnolm.training.assembly import assemble


def build(argv: Sequence[str]) -> VocAgnoTrainer:
    """Load all that a run needs, without a directory for it."""
    return VocAgnoTrainer(assembled=assemble(parse(argv)))
