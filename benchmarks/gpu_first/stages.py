"""The stages of a run, in the order of what matters, each in a process of its own.

A crash or a hang is a line, and the next stage runs. What is done is left out of the next call, and
what failed comes last. Nothing starts that would end too late. A stage that hangs is ended, and the
stacks of its threads are printed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import transformers

from benchmarks.gpu_first import machine, serving
from benchmarks.gpu_first.report import DONE, FAILED, Report, read
from benchmarks.gpu_first.speed import Variant

_GRACE_MINUTES = 0.75
_TRUSTED_MINUTES = 2  # how much the expectations weigh against what was taken


class Stage(NamedTuple):
    """What a stage measures, its name in the table, and the minutes that it may take on an H200."""

    label: str
    minutes: float
    run: Callable[[Report], None]


def _variant(label: str, minutes: float, **options: object) -> Stage:
    return Stage(label, minutes, Variant(**options).measure)  # type: ignore[arg-type]


# What matters most comes first.
STAGES = {
    "machine": Stage("the machine", 0.5, machine.look_at_machine),
    "eager": _variant("eager", 2),
    "compiled": _variant("`--torch_compile true`", 5, compiled=True),
    "liger": _variant("`--use_liger_kernel true`", 3, liger=True),
    "compiled-liger": _variant("both", 5, compiled=True, liger=True),
    "fp8": _variant("compiled, fp8 teacher", 6, compiled=True, fp8=True),
    "filled": _variant("compiled, largest micro-batches", 5, compiled=True, filled=True),
    "transformers": Stage(
        "transformers' engine, batches of 64", 2, serving.complete_with_transformers
    ),
    "vllm": Stage("vLLM", 5, serving.complete_with_vllm),
    "sdpa": _variant("eager, `sdpa`", 3, attention="sdpa"),
    "checkpointing": _variant("eager, `--activation_checkpointing true`", 2, checkpointing=True),
    "flash2": _variant("eager, `flash_attention_2`", 2, attention="flash_attention_2"),
    "flash3": _variant("eager, `flash_attention_3`", 2, attention="flash_attention_3"),
}


def run_stages(
    file: Path, names: Sequence[str], minutes: float, is_tiny: bool, directory: Path
) -> None:
    """Run the stages that the file has not, until the minutes are over."""
    said = read(file)
    left = [name for name in names if DONE not in said.get(name, ())]
    left.sort(key=lambda name: FAILED in said.get(name, ()))
    # A forked process cannot use a GPU of which its parent has asked anything.
    context = multiprocessing.get_context("spawn")
    began_s, taken, expected = time.monotonic(), 0.0, 0.0
    for number, name in enumerate(left):
        gone = (time.monotonic() - began_s) / 60
        pace = (taken + _TRUSTED_MINUTES) / (expected + _TRUSTED_MINUTES)
        rest = pace * sum(STAGES[other].minutes for other in left[number:])
        place = f"stage {number + 1} of {len(left)}"
        sys.stdout.write(f"{gone:.1f} minutes gone, about {rest:.0f} left: {name}, {place}\n")
        needed = pace * STAGES[name].minutes
        if gone + needed > minutes:
            sys.stdout.write(f"{name}: for the next call, as it may take {needed:.0f} minutes\n")
            continue
        sys.stdout.flush()
        limit = min(3 * max(needed, STAGES[name].minutes), minutes - gone + _GRACE_MINUTES)
        report = Report(file, name, is_tiny, Path(tempfile.mkdtemp(dir=directory)))
        stage = context.Process(target=_run_stage, args=(report, 60 * limit))
        stage.start()
        stage.join()
        if stage.exitcode:
            report.say(FAILED, f"it hung or crashed, with exit status {stage.exitcode}")
        if DONE in read(file).get(name, ()):
            taken += (time.monotonic() - began_s) / 60 - gone
            expected += STAGES[name].minutes


def _run_stage(report: Report, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True)
    transformers.utils.logging.disable_progress_bar()
    with report.ending():
        STAGES[report.stage].run(report)
    faulthandler.cancel_dump_traceback_later()
