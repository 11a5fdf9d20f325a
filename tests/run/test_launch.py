"""What `--accelerate_config` adds to Accelerate: signals and exit statuses come through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vocagnolm.cli import Exit

# Counts the signals that it gets in half a second. None ends before all have counted theirs,
# because torchrun then sends SIGTERM to the others.
WORKER = f"""
import os, signal, sys, time
from pathlib import Path
world = os.environ.get("WORLD_SIZE", "1")
got = Path(world + "-" + os.environ.get("RANK", "0"))
def note(number, frame):
    with got.open("a") as file:
        print(number, file=file)
signal.signal(signal.SIGTERM, note)
got.touch()
while not got.read_text():
    time.sleep(0.02)
time.sleep(0.5)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("counted-" + got.name).touch()
while len(list(Path().glob("counted-" + world + "-*"))) < int(world):
    time.sleep(0.02)
sys.exit({int(Exit.STOPPED)})
"""
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: "{kind}"
mixed_precision: "no"
num_machines: 1
num_processes: {processes}
use_cpu: true
main_process_port: 0
"""
# One job after the other, in one process, as imports take seconds.
START = """
from vocagnolm.launch import _run
print([_run([f"--config_file={name}", "--module", "worker"]) for name in ("1.yaml", "2.yaml")])
"""


@pytest.mark.processes
def test_signal_reaches_each_process_once_and_status_comes_back(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    for processes, kind in ((1, "NO"), (2, "MULTI_GPU")):
        text = CONFIG.format(kind=kind, processes=processes)
        (tmp_path / f"{processes}.yaml").write_text(text)
    job = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for processes in (1, 2):
        while len(list(tmp_path.glob(f"{processes}-*"))) < processes:
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=60) == (f"{[int(Exit.STOPPED)] * 2}\n", "")
    for name in ("1-0", "2-0", "2-1"):
        assert (tmp_path / name).read_text() == f"{signal.SIGTERM:d}\n"
