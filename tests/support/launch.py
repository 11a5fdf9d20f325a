"""Several gloo processes on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fork_server import ForkServer


def launch(script: Path | str, directory: Path, processes: int) -> None:
    """Run one job of a script that calls `serve`, and wait for its processes."""
    logs = [directory / f"{rank}.log" for rank in range(processes)]
    server = ForkServer(str(script))
    requests = [{"directory": str(directory), "log": str(log)} for log in logs]
    statuses = [server.wait(process) for process in server.start_job(*requests)]
    server.stop()
    assert not any(statuses), "\n".join(log.read_text()[-8000:] for log in logs)


def run_jobs(
    directory: Path, jobs: Sequence[dict[str, Any]], processes: int = 2
) -> list[dict[str, Any]]:
    """Run jobs of `trainer_worker.py` in turn; return the parameters that they save."""
    (directory / "jobs.json").write_text(json.dumps(jobs))
    launch("trainer_worker.py", directory, processes)
    saved = [directory / f"{i}.pt" for i, job in enumerate(jobs) if "argv" not in job]
    return [torch.load(path, weights_only=True) for path in saved]
