"""Starts processes of evaluate_math.py that have imported everything, so that they start at once.

python tests/eval_worker.py

Reads one JSON request per line: `{"argv": [...], "environ": {...}, "log": FILE}` starts a process
and is answered with its id, `{"wait": ID}` with its exit status, negative for a signal.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import evaluate_math


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


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if not answer:
                try:
                    run(request)
                finally:
                    os._exit(99)  # never back into the loop
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
