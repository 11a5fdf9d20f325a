"""The Slurm script, with stand-ins for srun, scontrol, pkill and vocagnolm."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "accelerate_configs" / "slurm.sh"
STAND_INS = {
    "srun": 'while [[ "$1" == --* ]]; do echo "$1" >> srun; shift; done; exec "$@"',
    "scontrol": 'if [[ "$1" == show ]]; then echo first; else echo "$@" >> "$LOG"; fi',
    "pkill": 'echo "pkill $*" >> "$LOG"; touch stop',
    # Records its arguments, runs until it is asked to stop, and fails as the launcher does.
    "vocagnolm": (
        'printf "%s\\n" "$@" > given; echo started >> "$LOG"\n'
        'if [[ "${DONE:-}" ]]; then exit 0; fi\n'
        "while [[ ! -e stop ]]; do read -r -t 0.05 <> <(:) || true; done; exit 1"
    ),
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, body in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tools / name).chmod(0o755)
    slurm = "JOB_ID=123456 JOB_NODELIST=n[1-2] NODEID=0 NNODES=2 CPUS_PER_TASK=64"
    values = dict(f"SLURM_{word}".split("=") for word in slurm.split())
    values |= {"SLURM_SUBMIT_DIR": str(tmp_path), "LOG": str(tmp_path / "log")}
    return {**os.environ, **values, "PATH": f"{tools}:{os.environ['PATH']}"}


@pytest.mark.processes
def test_slurm_script_requeues_when_it_is_preempted(
    environment: dict[str, str], tmp_path: Path
) -> None:
    job = subprocess.Popen(["bash", SCRIPT, "--teacher", "a b"], env=environment)
    log = Path(environment["LOG"])
    while not log.exists() or "started" not in log.read_text():
        assert job.poll() is None
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=30) == 1
    assert log.read_text().splitlines() == [
        "started",
        f"pkill -USR1 --uid {os.getuid()} --oldest --full -- -u -m vocagnolm train",
        "requeue 123456",
    ]
    given = (tmp_path / "given").read_text().splitlines()
    assert given[:3] == ["train", "--teacher", "a b"]
    pairs = {("--num_processes", "16"), ("--main_process_ip", "first"), ("--machine_rank", "0")}
    assert pairs < set(itertools.pairwise(given))


@pytest.mark.processes
def test_slurm_script_ends_with_the_job(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(["bash", SCRIPT], env=environment | {"DONE": "1"}, timeout=30)
    assert done.returncode == 0
    assert Path(environment["LOG"]).read_text() == "started\n"
    # All cores of a machine, as srun does not inherit their number.
    assert "--cpus-per-task=64" in (tmp_path / "srun").read_text().splitlines()
