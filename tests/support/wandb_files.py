"""What a run leaves in the files of Weights & Biases, read with its own tool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# What a training run leaves for its evaluations.
PLACE: dict[str, Any] = {
    "id": "abc123",
    "project": "students",
    "entity": None,
    "group": "table1",
    "name": "table1/a",
    "tags": ["cpt"],
    "config": {"method": "cpt", "models": {"student": {"parameters": 3}}},
}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this test's offline runs, without a user's key and settings."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    import wandb

    # wandb remembers the first environment that it sees.
    wandb.teardown()
    return tmp_path / "wandb"


def stored(run: Path) -> dict[str, Any]:
    """Config, summary, history and start record of a run that has ended."""
    (file,) = run.glob("*.wandb")
    deadline = time.monotonic() + 60
    # wandb's own process may still be writing.
    while not any(record["type"] == "exit" for record in records_of(file)):
        assert time.monotonic() < deadline, "wandb does not finish its file"
        time.sleep(0.2)
    records = records_of(file)
    start = next(record["run"] for record in records if record["type"] == "run")
    found: dict[str, Any] = {"run": start, "config": start["config"]["update"]}
    found |= {"summary": {}, "history": []}
    for record in records:
        kind = record["type"]
        if kind in ("config", "summary"):
            found[kind] |= record[kind].get("update", {})
        elif kind == "history":
            found["history"].append(record["history"]["item"])
    return found


def records_of(file: Path) -> list[dict[str, Any]]:
    """The records of a file, as `wandb leet inspect --json` prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    environment = os.environ | {"WANDB_MODE": "offline"}
    printed = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return [json.loads(line) for line in printed.stdout.splitlines() if line.startswith("{")]
