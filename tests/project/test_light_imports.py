"""Heavy packages that an import leaves to those who need them."""

from __future__ import annotations

import subprocess
import sys

import pytest

TEXT = "vocagnolm.spans, vocagnolm.readers, vocagnolm.alignment"
# What the commands' pages of help need is imported at the top of these, and no more.
COMMANDS = (
    "vocagnolm.launch, vocagnolm.evaluation.main, vocagnolm.report.audit, vocagnolm.demo.main, "
    "vocagnolm.store.score, vocagnolm.store.rank, vocagnolm.run.prepare"
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
            "import vocagnolm.report.compare, vocagnolm.report.plots",
            "torch transformers datasets evaluate sympy matplotlib wandb",
        ),
        ("import vocagnolm.report.inspect", "transformers datasets peft"),
    ],
)
def test_import_loads_nothing_heavy(code: str, heavy: str) -> None:
    code = f"{code}; import sys; print([m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
