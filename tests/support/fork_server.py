"""A process that imports once and forks for every request: each child is a script, started fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[dict[str, Any]], None]) -> None:
    """Answer JSON lines: what to run with the child's number, `{"wait": n}` with its status."""
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
