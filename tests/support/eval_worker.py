"""Runs evaluate_math.py with the `argv` of a `ForkServer` request, grading in this process."""

from __future__ import annotations

from typing import Any

import torch
from fork_server import serve
from inline_grader import graded_inline

from vocagnolm.evaluation import evaluate as evaluate_math
from vocagnolm.evaluation import runner


def run(request: dict[str, Any]) -> int:
    """Run the script."""
    with graded_inline(runner):
        status = evaluate_math.main(request["argv"])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    serve(run)
