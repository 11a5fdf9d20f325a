"""Kill, damage and mislead, and write into docs/reliability.md what came of it.

    python tests/support/stress.py [--kills N] [--damages N] [--seed S] [--outputs N]

Runs the tests that say what they do to a run (`pytest -m stress`), with larger numbers than the
suite and the same seeds, and adds up how often they did it. A test that fails is named below.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def run(directory: Path, numbers: dict[str, int]) -> tuple[ET.Element, float]:
    """Run the tests; their report, and the seconds that they took."""
    report = directory / "report.xml"
    chosen = ("-m", "stress", f"--junitxml={report}", "-q", "-o", "junit_family=xunit1")
    hangs = ("-o", "faulthandler_timeout=900")
    subprocess.run(
        [sys.executable, "-m", "pytest", *chosen, *hangs],
        cwd=ROOT,
        env=os.environ | {f"VOCAGNOLM_{name.upper()}": str(n) for name, n in numbers.items()},
        check=False,
    )
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    return suite, float(suite.attrib["time"])


def rows(suite: ET.Element) -> tuple[list[tuple[str, str, int, int]], list[str]]:
    """What was done, how each must end, how often, how often data was lost; and failed tests."""
    added: dict[tuple[str, str], list[int]] = {}
    failed = []
    for case in suite.iter("testcase"):
        said = {found.attrib["name"]: found.attrib["value"] for found in case.iter("property")}
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.attrib['classname']}.{case.attrib['name']}")
        elif case.find("skipped") is None:
            what, end = json.loads(said["stress"])
            row = added.setdefault((what, end), [0, 0])
            row[0] += int(said.get("times", 1))
            row[1] += int(said.get("lost", 0))
    return [(what, end, *numbers) for (what, end), numbers in sorted(added.items())], failed


def table(suite: ET.Element, seconds: float, numbers: dict[str, int]) -> str:
    """The measured part of the page."""
    found, failed = rows(suite)
    given = " ".join(f"--{name} {number}" for name, number in numbers.items())
    lines = [
        f"`python tests/support/stress.py {given}`, {seconds / 60:.0f} minutes:",
        "",
        "| what is done | times | each ends with | data lost |",
        "|---|---|---|---|",
        *(f"| {what} | {times:,} | {end} | {lost:,} |" for what, end, times, lost in found),
        f"| all | {sum(row[2] for row in found):,} | | {sum(row[3] for row in found):,} |",
        "",
        *(f"**Failed:** `{name}`" for name in failed),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Run, write the page, and say whether all held."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, number in (("kills", 12), ("damages", 120), ("outputs", 2000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=number)
    numbers = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="stress-") as directory:
        suite, seconds = run(Path(directory), numbers)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = before + BEGIN + "\n" + table(suite, seconds, numbers) + "\n" + END + after
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(table(suite, seconds, numbers))
    return int(bool(rows(suite)[1]))


if __name__ == "__main__":
    sys.exit(main())
