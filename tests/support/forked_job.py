"""Starts the processes of a gloo job by forking one that has done the slow imports.

python tests/support/forked_job.py SCRIPT DIRECTORY PROCESSES

Each is what `torchrun` would start; if one fails, the others are killed.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

from transformers import LlamaForCausalLM, Trainer  # noqa: F401 - imported before forking

import vocagnolm.run.train
import vocagnolm.trainer  # noqa: F401


def main() -> int:
    script, directory, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    running = set()
    for rank in range(processes):
        child = os.fork()
        if not child:
            run(script, directory, rank)
        running.add(child)
    while running:
        child, status = os.wait()
        running.discard(child)
        if status:
            for other in running:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def run(script: str, directory: str, rank: int) -> None:
    """Run one process of the job to its end."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [script, directory]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
