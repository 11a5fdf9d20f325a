"""The `vocagnolm` command: a table of commands, each loaded when it is run."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from importlib.metadata import version

from vocagnolm.host.command import Exit, OneLineErrors, stop

# name: (the module with `main(argv)`, one line of help)
COMMANDS = {
    "audit": ("vocagnolm.cli.audit", "How well a teacher's tokens map to a student's"),
    "compare": ("vocagnolm.cli.compare", "Tables and figures over finished runs"),
    "demo": ("vocagnolm.cli.demo", "Train and judge students in the embedded world, on a CPU"),
    "evaluate": ("vocagnolm.evaluation.main", "Accuracy on the paper's math benchmarks"),
    "export": ("vocagnolm.cli.export", "The student of a checkpoint, whole, for from_pretrained"),
    "inspect": ("vocagnolm.cli.inspect", "A text with its tokens kept, dropped and unmapped"),
    "prepare": ("vocagnolm.run.prepare", "The corpus of a run aligned ahead of it, without a GPU"),
    "reselect": ("vocagnolm.cli.reselect", "Selections under other settings, from stores"),
    "score": ("vocagnolm.cli.score", "Write, verify or repair a teacher-loss store"),
    "train": ("vocagnolm.run.start", "Continually pretrain a student"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, which reads the rest of the command line itself."""
    argv = sys.argv[1:] if argv is None else argv
    lines = (f"  {name:10}{sentence}" for name, (_, sentence) in COMMANDS.items())
    parser = OneLineErrors(
        "vocagnolm",
        description="\n".join(("Teacher-guided continual pretraining:", *lines)),
        epilog="vocagnolm COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('vocagnolm')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    try:
        command = parser.parse_args(argv[:1]).command
    except ValueError as error:
        return stop("vocagnolm", error, Exit.WRONG)
    # Only now, because importing the rest takes seconds.
    try:
        loaded = importlib.import_module(COMMANDS[command][0])
    except ImportError as error:
        return stop(f"vocagnolm {command}", error, Exit.WRONG)
    return int(loaded.main(argv[1:]))
