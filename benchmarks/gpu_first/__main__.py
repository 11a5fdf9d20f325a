"""Run the stages of a first run on a GPU.

    python -m benchmarks.gpu_first [--scale tiny] [--stages machine,equality] [--minutes 9]

A stage that fails is printed, and the next one runs; behind a lost device in a new process. Nothing
begins after --minutes; what hangs is ended soon after them, with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from benchmarks.gpu_first import equality, kernels, machine, serving, speed, training
from benchmarks.gpu_first.report import Report, free_memory, timed
from benchmarks.models import has_cuda

_GRACE_S = 45


def _at_true_size(report: Report) -> None:
    steps = speed.make_steps(report)
    with report.trial("steps"):
        speed.measure_steps(report, steps)
    kernels.measure_kernels(report, steps)


# In this order: what everything else rests on first, what may be cut off last.
STAGES: dict[str, Callable[[Report], None]] = {
    "machine": machine.look_at_machine,
    "equality": equality.compare_numbers,
    "waits": equality.look_for_waits,
    "training": training.train_and_resume,
    "evaluation": serving.evaluate,
    "scoring": serving.score,
    "speed": _at_true_size,
    "fsdp2": training.train_sharded,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are asked for, and return the exit status."""
    arguments = _parse(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(60 * arguments.minutes + _GRACE_S, exit=True)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        report = Report(
            arguments.output_dir,
            arguments.scale == "tiny",
            arguments.minutes,
            arguments.fsdp,
            Path(directory),
        )
        for number, name in enumerate(arguments.stages):
            report.stage = "fsdp2" if arguments.fsdp else name
            if not _run_stage(report, name):
                rest = ",".join(arguments.stages[number + 1 :])
                if rest:
                    _continue_anew(report, arguments, rest)
                break
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
    return 0


def _run_stage(report: Report, name: str) -> bool:
    """Run one stage; False where the device is lost to this process."""
    if report.minutes_left < 0:
        report.say("skipped", "time is over")
        return True
    with report.trial(name):
        STAGES[name](report)
    try:
        free_memory()
        timed(lambda: None)
    except RuntimeError as error:  # as after an assert on the device
        report.say("the device is lost to this process", str(error)[:200])
        return False
    report.say("done")
    return True


def _continue_anew(report: Report, arguments: argparse.Namespace, stages: str) -> None:
    """Put a new process in the place of this one, for the stages that are left."""
    options = {"scale": arguments.scale, "stages": stages, "minutes": max(report.minutes_left, 0)}
    options["output_dir"] = arguments.output_dir
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu_first", *given])


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
    parser.add_argument("--fsdp", action="store_true", help="Shards runs; for the stage fsdp2.")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))} among {', '.join(STAGES)}")
    if arguments.scale == "real" and not has_cuda():
        parser.error("--scale real needs a GPU: add --scale tiny")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
