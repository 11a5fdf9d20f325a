"""The table of commands: `vocagnolm COMMAND`, or `python -m vocagnolm COMMAND`.

`accelerate launch -m vocagnolm COMMAND` runs one in several processes.
"""

from __future__ import annotations

import importlib
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from vocagnolm.cli import OneLineErrors, run_script, shell

# Each name stands for a module with `main(argv)` and for one line of help.
COMMANDS = {
    "audit": (
        "vocagnolm.report.audit",
        "Measure how well a teacher's tokens align with a student's",
    ),
    "compare": ("vocagnolm.report.compare", "Compare finished runs: tables, tests and figures"),
    "demo": ("vocagnolm.demo.main", "Train and judge small students on a CPU, without a download"),
    "evaluate": (
        "vocagnolm.evaluation.evaluate",
        "Measure accuracy on math benchmarks",
    ),
    "export": ("vocagnolm.run.export", "Turn a checkpoint into a model for from_pretrained"),
    "inspect": ("vocagnolm.report.inspect", "Show which tokens of a text would be trained"),
    "prepare": ("vocagnolm.run.prepare", "Align a run's corpus in advance, without a GPU"),
    "rank": ("vocagnolm.store.rank", "Rank documents by a teacher's losses, and keep the best"),
    "recipes": ("vocagnolm.run.recipe", "List the recipes for train --config"),
    "score": ("vocagnolm.store.score", "Write or verify a store of teacher losses"),
    "train": ("vocagnolm.run.parser", "Continually pretrain a student"),
    "weights": ("vocagnolm.run.weights", "Write token losses and weights for any trainer"),
}
# Several processes share the work of these commands. Their modules have a `check(argv)` that does
# not import torch.
_SHARED = ("evaluate", "score", "train", "weights")


@shell("vocagnolm")
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, which reads the rest of the command line itself."""
    argv = sys.argv[1:] if argv is None else argv
    # argparse's own subcommands would need the parser of every command, and so would import all of
    # them.
    description = "Teacher-guided continual pretraining:"
    for name, (_, sentence) in COMMANDS.items():
        description += f"\n  {name:10}{sentence}"
    parser = OneLineErrors(
        "vocagnolm", None, description, formatter_class=RawDescriptionHelpFormatter
    )
    parser.epilog = (
        "vocagnolm COMMAND --help shows its options. With --accelerate_config NAME, evaluate, "
        "score, train and weights start several processes."
    )
    try:
        release = version("vocagnolm")
    except PackageNotFoundError:
        release = "(not installed)"  # a checkout
    parser.add_argument("--version", action="version", version=f"%(prog)s {release}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    # Only the first word is read here: --help after a command is the command's.
    command = parser.parse_args(argv[:1]).command
    command_argv = argv[1:]
    # Import the module only when the command is known, because importing takes seconds.
    module = importlib.import_module(COMMANDS[command][0])
    if command in _SHARED and any(word.startswith("--accelerate_config") for word in command_argv):
        from vocagnolm.run.launch import launch

        return launch(command, command_argv, module.check)
    return int(module.main(command_argv))


def start() -> NoReturn:
    """Run one command as a process."""
    run_script(main)


if __name__ == "__main__":
    start()
