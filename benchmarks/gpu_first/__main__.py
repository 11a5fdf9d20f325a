"""Run the stages of a first report of a GPU's speed.

    python -m benchmarks.gpu_first [--scale tiny] [--stages machine,speed] [--minutes 9]

A failure is printed, and the next part runs. Nothing starts after --minutes. If the run hangs, it
is killed soon after that, and the stacks of all threads are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import transformers

from benchmarks.gpu_first import kernels, machine, serving, speed
from benchmarks.gpu_first.report import Report, free_memory
from benchmarks.models import has_cuda

_GRACE_S = 45


def _at_true_size(report: Report) -> None:
    steps = speed.make_steps(report)
    with report.trial("steps"):
        speed.measure_steps(report, steps)
    kernels.measure_kernels(report, steps)


# The stage that may be cut off comes last.
STAGES: dict[str, Callable[[Report], None]] = {
    "machine": machine.look_at_machine,
    "evaluation": serving.evaluate,
    "scoring": serving.score,
    "speed": _at_true_size,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the requested stages, and return the exit status."""
    arguments = _parse(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(60 * arguments.minutes + _GRACE_S, exit=True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        is_tiny = arguments.scale == "tiny"
        report = Report(arguments.output_dir, is_tiny, arguments.minutes, Path(directory))
        for report.stage in arguments.stages:
            if report.minutes_left < 0:
                report.say("skipped", "time is over")
                continue
            with report.trial(report.stage):
                free_memory()
                STAGES[report.stage](report)
                report.say("done")
    faulthandler.cancel_dump_traceback_later()
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_first", description=__doc__)
    scale = "real" if has_cuda() else "tiny"
    parser.add_argument("--scale", choices=("real", "tiny"), default=scale)
    parser.add_argument(
        "--stages",
        type=lambda text: text.split(","),
        default=list(STAGES),
        help=f"Some of {','.join(STAGES)}; default: all.",
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="Nothing begins after them.")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path(os.environ.get("OUT", "runs/gpu_first")),
        help="Gets the lines as JSON.",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))} among {', '.join(STAGES)}")
    if arguments.scale == "real" and not has_cuda():
        parser.error("--scale real needs a GPU: add --scale tiny")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
