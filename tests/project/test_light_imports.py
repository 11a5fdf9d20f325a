"""Imports that must not load heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

TEXT = "vocagnolm.spans, vocagnolm.readers, vocagnolm.alignment"
# These import at the top only what their commands' help needs.
COMMANDS = (
    "vocagnolm.run.launch, vocagnolm.evaluation.evaluate, vocagnolm.report.audit, "
    "vocagnolm.demo.main, vocagnolm.store.score, vocagnolm.store.rank, vocagnolm.run.prepare"
)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (
            f"import {TEXT}, {COMMANDS}; from vocagnolm import encode, align_spans",
            "torch transformers datasets",
        ),
        (
            "import vocagnolm.report.compare",
            "torch transformers datasets evaluate sympy matplotlib wandb",
        ),
        ("import vocagnolm.report.inspect", "transformers datasets peft"),
    ],
)
def test_import_loads_nothing_heavy(code: str, heavy: str) -> None:
    code = f"{code}; import sys; print([m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
