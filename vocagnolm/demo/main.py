"""CPT, VocAgnoLM and random tokens compared, in an embedded world that needs no download.

    vocagnolm demo                                 # five minutes on two CPU cores
    vocagnolm demo --seeds 0 --methods cpt --options max_steps=2

Exit status: 0 done, 2 a wrong argument, 3 a run failed.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from vocagnolm.cli import Exit, Parser, shell, stop

_NAME = "vocagnolm demo"
# Names of runs: their labels, and what they add to the recipe.
METHODS = {
    "share": ("VocAgnoLM, share", "--method=vocagnolm", "--aggregation=share"),
    "vocagnolm": ("VocAgnoLM", "--method=vocagnolm"),
    "cpt": ("CPT", "--method=cpt"),
    "random": ("random 40 %", "--method=random"),
}


@shell(_NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    # As an exception, so that the demo's processes end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("runs/demo"))
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="A student for each.")
    add("--wrong_share", type=float, default=0.4, help="Pages with wrong solutions.")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    for name, runs in (("options", "all runs"), ("guidance", "those with VocAgnoLM")):
        add(f"--{name}", nargs="+", default=(), metavar="NAME=VALUE", help=f"For train.py: {runs}.")
    arguments = parser.parse_args(argv)
    from vocagnolm.demo.run import run_demo

    try:
        run_demo(arguments)
    except RuntimeError as error:
        return stop(_NAME, error, Exit.BAD_NUMBERS)
    return Exit.DONE
