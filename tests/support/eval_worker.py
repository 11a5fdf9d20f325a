"""Starts processes of evaluate_math.py that have imported everything, so that they start at once.

python tests/support/eval_worker.py

Reads one JSON request per line: `{"argv": [...], "environ": {...}, "log": FILE}` starts a process
and is answered with its id, `{"wait": ID}` with its exit status, negative for a signal.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from fork_server import serve

from vocagnolm.evaluation import main as evaluate_math


def run(request: dict[str, Any]) -> None:
    """Be the script, in a process of its own."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= request["environ"]
    status = evaluate_math.main(request["argv"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    # One exit in about twenty would abort in gloo's threads, with all the work done.
    os._exit(status)


if __name__ == "__main__":
    serve(run)
