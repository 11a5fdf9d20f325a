"""Several gloo processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).parent


def launch(script: Path | str, directory: Path, processes: int) -> None:
    """Run `SCRIPT DIRECTORY` in several processes, and wait for them."""
    path = os.pathsep.join(filter(None, [str(_HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [
            *(sys.executable, str(_HERE / "forked_job.py")),
            *(str(_HERE / script), str(directory), str(processes)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]


def run_jobs(
    directory: Path, jobs: Sequence[dict[str, Any]], processes: int = 2
) -> list[dict[str, Any]]:
    """Run jobs of `trainer_worker.py` in turn; return the parameters that they save."""
    (directory / "jobs.json").write_text(json.dumps(jobs))
    launch("trainer_worker.py", directory, processes)
    saved = [directory / f"{i}.pt" for i, job in enumerate(jobs) if "argv" not in job]
    return [torch.load(path, weights_only=True) for path in saved]
