"""The results of claims, as a table and as the generated part of `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Claim, Measured
from vocagnolm.io import markdown_table, versions

BEGIN, END = "<!-- measured: make bench -->", "<!-- end of measured -->"
HEADER = ["name", "claim", "limit", "measured", "holds"]
PACKAGES = "python torch transformers tokenizers datasets numpy trl math-verify lm-eval"


@dataclass
class Page:
    """What was measured, in its order.

    Attributes:
        skipped: a line for each claim that could not be measured here.
        failed: a claim does not hold.
    """

    rows: list[list[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: bool = False
    _details: dict[tuple[str, ...], list[str]] = field(default_factory=dict)
    _missed: list[str] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _load: float = field(default_factory=lambda: os.getloadavg()[0])

    def add(self, name: str, claim: Claim, measured: Measured) -> tuple[str, ...]:
        """Add a claim, and return what of its details is new."""
        holds = claim.holds(measured.value) and not measured.broken
        self.failed |= not holds
        verdict = "yes" if holds else f"NO {measured.broken}".strip()
        self.rows.append([name, claim.says, claim.limit, claim.show(measured.value), verdict])
        if claim.missed and not holds:
            self._missed.append(f"- `{name}`: {claim.missed}")
        # Several claims of one measurement have its details once.
        is_new = measured.details not in self._details
        self._details.setdefault(measured.details, []).append(name)
        return measured.details if is_new else ()

    def table(self) -> str:
        """One row for each claim."""
        return markdown_table([HEADER, *self.rows])

    def text(self) -> str:
        """The generated part of the page."""
        minutes, memory = (time.monotonic() - self._begun) / 60, os.sysconf("SC_PHYS_PAGES")
        gib = memory * os.sysconf("SC_PAGE_SIZE") / 2**30
        packages = ", ".join(map(" ".join, versions(PACKAGES).items()))
        head = (
            f"`make bench`, {minutes:.0f} minutes: {processor()}, {os.cpu_count()} cores, "
            f"{gib:.0f} GiB; load {self._load:.1f} at the beginning and "
            f"{os.getloadavg()[0]:.1f} at the end; {packages}."
        )
        notes = [*self._missed, *(f"- {line}" for line in self.skipped)]
        parts = [head, self.table() if self.rows else "", "\n".join(notes)]
        for details, names in self._details.items():
            if details:
                titles = ", ".join(f"`{name}`" for name in names)
                parts.append("\n".join([f"### {titles}\n", "```", *details, "```"]))
        return "\n\n".join(filter(None, parts))

    def write(self, path: Path) -> None:
        """Replace what stands between the marks of a page."""
        before, after = around(path)
        path.write_text(f"{before}{BEGIN}\n\n{self.text()}\n\n{END}{after}", encoding="utf-8")


def around(path: Path) -> tuple[str, str]:
    """What stands before and behind the marks of a page.

    Raises:
        ValueError: it has none.
    """
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"expected {BEGIN} and {END} in {path}, found no such part")
    return before, after


def processor() -> str:
    """The name of the processor."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
