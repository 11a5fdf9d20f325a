"""Prints a job's messages once, however many processes it has. Does not import torch."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def is_main() -> bool:
    """Return True in the first process of a job, before and after the processes are connected."""
    # A launcher sets RANK in each process. Without a launcher there is only one process.
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str | None, file: TextIO | None = None) -> None:
    """Print a result once per job; nothing for None and ""."""
    if text and is_main():
        print(text, file=file, flush=True)


def log_main(text: str | None) -> None:
    """Print on stderr whatever is not a result, once per job."""
    # Stdout has only results, so that it can be piped into a file or another program.
    print_main(text, sys.stderr)
