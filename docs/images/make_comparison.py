"""Make comparison-light.png, -dark.png and -phone.png: the page of the demo's runs compared.

    vocagnolm demo --seeds 0 1 --output_dir runs/demo
    python docs/images/make_comparison.py runs/demo

Evaluates the runs on the demo's problems (10 s each on a CPU core) where they are not evaluated.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from photograph import PHONE, photograph

from vocagnolm import cli
from vocagnolm.demo import METHODS

IMAGES = Path(__file__).parent


def main(demo: Path) -> None:
    """Evaluate, compare, and photograph the page."""
    seeds = sorted(demo.glob("seed*"))
    runs = [
        seed / method for seed in seeds for method in sorted(METHODS) if (seed / method).is_dir()
    ]
    for run in runs:
        if not (run / "evaluation").is_dir():
            _do(["evaluate", "--model", str(run), "--benchmarks", "demo"])
    with tempfile.TemporaryDirectory() as scratch:
        _do(["compare", *map(str, runs), "--output_dir", scratch])
        page = Path(scratch, "comparison.html").as_uri()
        photograph(page, IMAGES / "comparison-light.png", 1200, 1090, 1.0)
        photograph(page, IMAGES / "comparison-dark.png", 1200, 1090, 1.0, dark=True)
        photograph(page, IMAGES / "comparison-phone.png", PHONE, 1090, 1.0)


def _do(argv: list[str]) -> None:
    if status := cli.main(argv):
        sys.exit(status)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
