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
from vocagnolm.demo import METHODS
from vocagnolm.host.options import refuse_idle

_NAME = "vocagnolm demo"
_SEEDS = (0, 1, 2, 3)


@shell(_NAME)
def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    # As an exception, so that the demo's processes end with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = Parser(_NAME, __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("runs/demo"))
    add("--seeds", type=int, nargs="+", default=_SEEDS, help="One student per method and seed.")
    add("--wrong_share", type=float, default=0.4, help="Pages with wrong solutions.")
    add("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    for name, runs in (("--options", "all runs"), ("--guidance", "those with VocAgnoLM")):
        add(name, nargs="+", default=(), metavar="NAME=VALUE", help=f"For train.py: {runs}.")
    arguments = parser.parse_args(argv)
    if not {"share", "vocagnolm"} & {*arguments.methods}:
        refuse_idle(parser.given(arguments), ("guidance",), "without VocAgnoLM among --methods")
    from vocagnolm.demo.run import run_demo
    from vocagnolm.demo.worker import Plan

    plan = Plan(
        arguments.output_dir.resolve(),
        tuple(arguments.seeds),
        arguments.wrong_share,
        tuple(f"--{option}" for option in arguments.options),
        tuple(f"--{option}" for option in arguments.guidance),
        methods=tuple(arguments.methods),
    )
    try:
        run_demo(plan)
    # A run of the demo failed, and its log tells why.
    except RuntimeError as error:
        return stop(_NAME, error, Exit.BAD_NUMBERS)
    return Exit.DONE
