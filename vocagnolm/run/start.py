"""`train.py` and `vocagnolm train`: a page of help at once, or the job."""

import sys
from collections.abc import Sequence

from vocagnolm.run.recipe import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Show a page of help, or run the job, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help", "--help_all"} & set(argv):
        parse(argv)
    from vocagnolm.run.main import main as run

    return run(argv)
