"""The notebook runs from top to bottom, and the guided student is ahead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples/five_minutes.ipynb"


@pytest.mark.slow
def test_notebook_ends_with_the_guided_student_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    guided, plain = (names["results"][name] for name in ("guided", "plain"))
    assert guided["answer_loss"] < plain["answer_loss"]
