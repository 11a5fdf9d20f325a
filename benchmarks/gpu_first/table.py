"""Write what a run has measured into the page about speed."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from benchmarks.gpu_first.report import DONE, FAILED, SKIPPED, Lines
from benchmarks.gpu_first.serving import WRITTEN
from benchmarks.gpu_first.speed import SCORE, SHAPE
from benchmarks.page import replace_between
from benchmarks.steps import CPT, ONLINE, STORED, TEACHER
from vocagnolm.shell.io import markdown_table

BEGIN, END = "<!-- measured: python -m benchmarks.gpu_first -->", "<!-- end of measured -->"
_REASON = 150  # characters
_COLUMNS = {
    CPT: "CPT step",
    STORED: "step from a store",
    TEACHER: "teacher's forward pass",
    ONLINE: "step with the teacher in memory",
    SCORE: "`vocagnolm score`",
}


def write(page: Path, lines: Lines, labels: dict[str, str]) -> None:
    """Replace the page's numbers. A run without a finished stage of steps changes nothing."""
    text = text_of(lines, labels)
    if text:
        replace_between(page, BEGIN, END, text)


def text_of(lines: Lines, labels: dict[str, str]) -> str:
    """Return the table of a run's stages, in the order of their labels, and what is not in it."""
    rows, others = [["", *_COLUMNS.values()]], []
    for stage, label in labels.items():
        said = lines.get(stage, {})
        if FAILED in said or SKIPPED in said:
            reason = said.get(FAILED, said.get(SKIPPED, {}))["value"].splitlines()[0]
            others.append(f"- {label}: not measured: {reason[:_REASON]}")
        elif DONE in said and CPT in said:
            shape = said[SHAPE]["value"]
            if shape != lines.get("eager", said).get(SHAPE, {}).get("value", shape):
                label += f" ({shape})"
            rows.append([label, *(_cell(said.get(name)) for name in _COLUMNS)])
        elif DONE in said and WRITTEN in said:
            others.append(f"- {label}: {said[WRITTEN]['value']:,.0f} new tokens per second.")
    if len(rows) == 1:
        return ""
    machine = lines.get("machine", {}).get("machine", {})
    packages = ", ".join(map(" ".join, machine.get("versions", {}).items()))
    about = (
        f"Measured on one {machine.get('value')} ({machine.get('month')}; {packages}): TinyLlama "
        "1.1B and Qwen2.5-Math-7B with random weights, in bfloat16. A step has 4 micro-batches of "
        "4 packed sequences of 2,048 tokens. Each cell has the share of the dense bf16 peak that "
        "the FLOPs of the losses reach, and tokens per second; medians of four steps:"
    )
    listed = [textwrap.fill(line, 116, subsequent_indent="  ") for line in others]
    parts = [textwrap.fill(about, 116), markdown_table(rows), "\n".join(listed)]
    return "\n\n".join(filter(None, parts))


def _cell(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return ""
    share = f"{measured['mfu']:.0%}, " if "mfu" in measured else ""
    return f"{share}{measured['tokens_per_s']:,.0f}"
