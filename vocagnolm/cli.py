"""The `vocagnolm` command; `train.py` is a script of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Where each command's `main(argv)` is; a module is loaded when its command is run.
COMMANDS = {
    "audit": "vocagnolm.analysis.audit",
    "compare": "vocagnolm.analysis.compare",
    "demo": "vocagnolm.demo.run",
    "export": "vocagnolm.run.export",
    "inspect": "vocagnolm.views.measure",
    "reselect": "vocagnolm.store.reselect",
    "score": "vocagnolm.store.score",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, which reads the rest of the command line itself."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="vocagnolm", description=__doc__)
    parser.add_argument("command", choices=COMMANDS, help="vocagnolm COMMAND --help says more")
    module = importlib.import_module(COMMANDS[parser.parse_args(argv[:1]).command])
    return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
