"""Jobs of several processes: of torchrun, and what `--accelerate_config` adds to Accelerate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from world import World

from vocagnolm.cli import Exit

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2".split()]
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
CONFIG = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "no", "use_cpu": True}
CONFIG |= {"num_machines": 1, "main_process_port": 0}
# One job after the other, in one process, as imports take seconds.
START = """
import json
from vocagnolm.run.launch import _run
def status(name):
    try:
        return _run([f"--config_file={name}", "--module", "worker"])
    except KeyboardInterrupt:
        return "interrupted"
print(json.dumps([status(name) for name in ("1.json", "2.json")]))
"""
# A worker that has not begun to train has no handlers yet.
IDLE_WORKER = """
import os, time
from pathlib import Path
Path(os.environ.get("WORLD_SIZE", "1") + "-" + os.environ.get("RANK", "0")).touch()
time.sleep(60)
"""


def send_to_jobs(directory: Path, worker: str, number: signal.Signals) -> list[object]:
    """Send a signal to all workers of a job of one, then of two processes; return statuses."""
    (directory / "worker.py").write_text(worker)
    for processes, kind in ((1, "NO"), (2, "MULTI_GPU")):
        config = CONFIG | {"num_processes": processes, "distributed_type": kind}
        (directory / f"{processes}.json").write_text(json.dumps(config))
    job = subprocess.Popen(
        [sys.executable, "-c", START],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Each worker leaves a file when it runs.
    for processes in (1, 2):
        while len(list(directory.glob(f"{processes}-*"))) < processes:
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        job.send_signal(number)
    out, err = job.communicate(timeout=60)
    assert not err
    return json.loads(out)


def test_signal_reaches_each_process_once_and_status_comes_back(tmp_path: Path) -> None:
    assert send_to_jobs(tmp_path, WORKER, signal.SIGTERM) == [Exit.STOPPED] * 2
    for name in ("1-0", "2-0", "2-1"):
        assert (tmp_path / name).read_text() == f"{signal.SIGTERM:d}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_before_training_interrupts_the_job(number: signal.Signals, tmp_path: Path) -> None:
    assert send_to_jobs(tmp_path, IDLE_WORKER, number) == ["interrupted"] * 2


@pytest.mark.slow
def test_torchrun_trains_one_student_without_a_gpu(world: World) -> None:
    changes = {"teacher": None, "method": "cpt", "eval_fraction": None, "logging_steps": "1"}
    argv = world.argv("run", global_batch_tokens="128", max_steps="2", **changes)
    done = subprocess.run(  # no option says that there is no GPU
        [*TORCHRUN, "train.py", *argv],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "128 tokens = 2 processes x 1 sequence x 1 accumulation step x 64" in done.stdout
    assert done.stdout.count("saved ") == 1
    assert {path.stem for path in world.root.glob("run/*/metrics_*")} == {"metrics_0", "metrics_1"}
