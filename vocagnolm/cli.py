"""The `vocagnolm` command; `train.py` is a script of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vocagnolm import comparison, demo

COMMANDS = {"compare": comparison.main, "demo": demo.main}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, which reads the rest of the command line itself."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="vocagnolm", description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="vocagnolm COMMAND --help says more")
    return COMMANDS[parser.parse_args(argv[:1]).command](argv[1:])
