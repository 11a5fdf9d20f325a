"""Heavy packages that an import leaves to those who need them."""

from __future__ import annotations

import subprocess
import sys

import pytest

TEXT = "vocagnolm.spans, vocagnolm.readers, vocagnolm.alignment, vocagnolm.readers"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import vocagnolm", "torch transformers datasets"),
        (f"import {TEXT}", "torch transformers datasets"),
        ("from vocagnolm import encode, align_spans", "torch transformers datasets"),
        (
            "import vocagnolm.report.compare",
            "torch transformers datasets evaluate sympy matplotlib wandb",
        ),
        ("import vocagnolm.report.plots", "matplotlib"),
        # The commands' pages of help need what they import at the top, and no more.
        ("import vocagnolm.launch, vocagnolm.evaluation.main", "torch transformers datasets"),
        (
            "import vocagnolm.report.audit, vocagnolm.demo.main",
            "torch transformers datasets",
        ),
        ("import vocagnolm.store.score, vocagnolm.run.prepare", "torch transformers datasets"),
        (
            "import vocagnolm.report.inspect",
            "transformers datasets peft",
        ),
    ],
)
def test_import_loads_nothing_heavy(code: str, heavy: str) -> None:
    code = f"{code}; import sys; print([m for m in {heavy.split()} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
