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

# Notes the signals that it gets in half a second.
WORKER = f"""
import os, signal, sys, time
from pathlib import Path
got = Path("signals" + os.environ.get("RANK", "0"))
def note(number, frame):
    with got.open("a") as file:
        print(number, file=file)
signal.signal(signal.SIGTERM, note)
got.touch()
while not got.read_text():
    time.sleep(0.02)
time.sleep(0.5)
sys.exit({int(Exit.STOPPED)})
"""
START = "import sys; from vocagnolm.launch import _run; sys.exit(_run(sys.argv[1:]))"


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, 2])
def test_signal_reaches_each_process_once_and_status_comes_back(
    processes: int, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    kind = "MULTI_GPU" if processes > 1 else "NO"
    (tmp_path / "config.yaml").write_text(
        f"compute_environment: LOCAL_MACHINE\ndistributed_type: '{kind}'\nmixed_precision: 'no'\n"
        f"num_machines: 1\nnum_processes: {processes}\nuse_cpu: true\nmain_process_port: 0\n"
    )
    words = ["--config_file=config.yaml", "--module", "worker"]
    job = subprocess.Popen(
        [sys.executable, "-c", START, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(tmp_path.glob("signals*"))) < processes:
        assert job.poll() is None, job.communicate()[1]
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, printed = job.communicate(timeout=60)
    assert (job.returncode, printed) == (Exit.STOPPED, "")
    for rank in range(processes):
        assert (tmp_path / f"signals{rank}").read_text() == f"{signal.SIGTERM:d}\n"
