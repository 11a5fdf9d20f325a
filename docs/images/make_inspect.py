"""Make inspect.png: the guidance view of a page of the demo world, right and wrong.

    python docs/images/make_inspect.py

Trains the demo's first student (10 s on a CPU core), which has read questions and noise but no
answer, and lets the demo's teacher judge two pages for it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from vocagnolm.demo.run import BASE, TEACHER, make_base
from vocagnolm.demo.world import write_jsonl
from vocagnolm.io import ASSETS
from vocagnolm.report import inspect

IMAGE = Path(__file__).with_name("inspect.png")
PAGE = (
    "Home | Login | Archive | Reply\nQ: Zoe fills 4 bags. Each one holds 9 shells. How many shells"
    " does Zoe need?\nA: {}\nPosted by eli6157 on 1992-10-01 at 07:08"
)
SOLUTIONS = ("4 * 9 = 36. #### 36", "4 + 9 = 32. #### 32")
SHOWN = "␣32"  # the token whose details are open: the wrong result
WIDTH, HEIGHT = 1200, 1060


def main() -> None:
    """Train, inspect, and photograph the page."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        make_base(scratch, 0)
        pages = scratch / "pages.jsonl"
        write_jsonl(pages, (PAGE.format(solution) for solution in SOLUTIONS))
        status = inspect.main(
            [
                *("--dataset", str(pages), "--document", *map(str, range(len(SOLUTIONS)))),
                *("--student", str(scratch / BASE), "--teacher", str(ASSETS / TEACHER)),
                *("--output_dir", str(scratch)),
            ]
        )
        if status:
            sys.exit(status)
        page = scratch / inspect.PAGE
        facts = page.read_text().split('<script id="facts" type="application/json">')[1]
        names = [name for name, *_ in json.loads(facts.split("</script>")[0])["tokens"]]
        number = names.index(SHOWN)
        photograph(f"{page.as_uri()}#t{number}", scratch / "profile")


def photograph(address: str, profile: Path) -> None:
    """Let Chromium draw a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/images: Chromium is needed, found none: install it")
    command = [browser, "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"]
    command += ["--force-device-scale-factor=1.5", f"--screenshot={IMAGE}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
