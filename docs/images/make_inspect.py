"""Make inspect.png: the guidance view of a page of the demo world, right and wrong.

    python docs/images/make_inspect.py

Trains the demo's first student (10 s on a CPU core), which has read questions and noise but no
answer, and lets the demo's teacher judge two pages for it. Needs Chromium, and looks best where the
fonts Inter and JetBrains Mono are installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGE = Path(__file__).with_name("inspect.png")
ROOT = Path(__file__).parents[2]
sys.path.insert(
    0, str(ROOT)
)  # train.py, which trains the demo's student, is no part of the package

from vocagnolm.cli import inspect  # noqa: E402
from vocagnolm.demo.models import ASSETS, TEACHER  # noqa: E402
from vocagnolm.demo.worker import BASE, BASE_OPTIONS, make_base  # noqa: E402
from vocagnolm.demo.world import write_jsonl  # noqa: E402
from vocagnolm.views.view import read_views  # noqa: E402

PAGE = (
    "Home | Login | Archive | Reply\nQ: Zoe fills 4 bags. Each one holds 9 shells. How many shells"
    " does Zoe need?\nA: {}\nPosted by eli6157 on 1992-10-01 at 07:08"
)
SOLUTIONS = ("4 * 9 = 36. #### 36", "4 + 9 = 32. #### 32")
SHOWN = " 32"  # the token whose details are open: the wrong result
WIDTH, HEIGHT = 1200, 1000


def main() -> None:
    """Train, inspect, and photograph the page."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        make_base(scratch, 0, BASE_OPTIONS)
        pages = scratch / "pages.jsonl"
        write_jsonl(pages, (PAGE.format(solution) for solution in SOLUTIONS))
        status = inspect.main(
            [
                *("--dataset", str(pages), "--documents", str(len(SOLUTIONS))),
                *("--student", str(scratch / BASE), "--teacher", str(ASSETS / TEACHER)),
                *("--output_dir", str(scratch)),
            ]
        )
        if status:
            sys.exit(status)
        photograph(_named(scratch), scratch / "profile")


def _named(scratch: Path) -> str:
    """Address of the page, with names in place of the directories of this machine."""
    page = scratch / f"{inspect.FILE_NAME}.html"
    html = page.read_text(encoding="utf-8")
    html = html.replace(str(scratch / BASE), "demo student").replace(
        str(ASSETS / TEACHER), "demo teacher"
    )
    page.write_text(html, encoding="utf-8")
    tokens = read_views(page.with_suffix(".json")).tokens
    number = next(number for number, token in enumerate(tokens) if token.text == SHOWN)
    return f"{page.as_uri()}#t{number}"


def photograph(address: str, profile: Path) -> None:
    """Let Chromium draw a page, twice as fine as it is wide."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("make_inspect: Chromium is needed, found none: install it")
    quiet = ("quic", "background-networking", "component-update", "sync", "gpu")
    subprocess.run(
        [
            *(browser, "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"),
            *(f"--disable-{feature}" for feature in quiet),
            *(f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"),
            *("--force-device-scale-factor=1.5", f"--screenshot={IMAGE}", address),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )


if __name__ == "__main__":
    main()
