"""Write the results of the claims as a table, to the terminal and to `benchmarks/CLAIMS.md`."""

from __future__ import annotations

import os
import platform
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Claim, Measured
from vocagnolm.shell.io import markdown_table, versions

BEGIN, END = "<!-- measured: make bench -->", "<!-- end of measured -->"
HEADER = ["claim", "limit", "measured", "holds", "python -m benchmarks"]
PACKAGES = "python torch transformers tokenizers datasets numpy trl math-verify lm-eval"


@dataclass
class Page:
    """The measurements in order, and the page that shows them between its marks, if there is one.

    Attributes:
        lines: one for each measurement that has a note, or that could not be made here.
        failed: whether a claim does not hold.
    """

    path: Path | None = None
    rows: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    failed: bool = False
    _begun: float = field(default_factory=time.monotonic)

    def add(self, command: str, claims: Sequence[Claim], measured: Measured) -> None:
        """Add a row for each claim of a measurement, and the measurement's note."""
        if measured.note:
            self.lines.append(f"{command}: {measured.note}")
        for claim in claims:
            value = measured.values[claim.name]
            holds = claim.holds(value) and not measured.broken
            self.failed |= not holds
            verdict = "yes" if holds else f"NO {measured.broken}".strip()
            self.rows.append([claim.says, claim.limit, claim.show(value), verdict, command])

    def text(self) -> str:
        """Return the table, the lines, and where this was measured."""
        minutes = (time.monotonic() - self._begun) / 60
        packages = ", ".join(map(" ".join, versions(PACKAGES).items()))
        where = (
            f"{minutes:.0f} minutes on {processor()}, {os.cpu_count()} cores, "
            f"load {os.getloadavg()[0]:.1f} at the end; {packages}."
        )
        table = markdown_table([HEADER, *self.rows]) if self.rows else ""
        items = [textwrap.fill(f"- {line}", 116, subsequent_indent="  ") for line in self.lines]
        parts = [table, "\n".join(items), textwrap.fill(where, 116)]
        return "\n\n".join(filter(None, parts))

    def write(self) -> None:
        """Replace the text between the marks of the page."""
        if self.path:
            replace_between(self.path, BEGIN, END, self.text())


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def processor() -> str:
    """Return the name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
