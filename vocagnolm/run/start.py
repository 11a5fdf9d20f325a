"""`train.py` and `vocagnolm train`: a page of help at once, or the job."""

import sys
from collections.abc import Sequence

from vocagnolm.cli import Exit, say
from vocagnolm.run import HELP_PAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Show a page of help, or run the job, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help_all" in argv:
        from vocagnolm.run.parse import make_parser

        make_parser().print_help()
        raise SystemExit(Exit.DONE)
    if {"-h", "--help"} & set(argv):
        say(HELP_PAGE.read_text(encoding="utf-8").rstrip())
        raise SystemExit(Exit.DONE)
    from vocagnolm.run.main import main as run

    return run(argv)
