"""Run the stages of a first report of a GPU's speed, and write the page.

    python -m benchmarks.gpu_first [--scale tiny] [--stages machine,eager] [--minutes 60]

A call goes on where the last one ended. Other code or another GPU begins another file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_first import table
from benchmarks.gpu_first.machine import device_name
from benchmarks.gpu_first.report import DONE, name_run, read
from benchmarks.gpu_first.stages import STAGES, run_stages
from benchmarks.models import has_cuda

_PAGE = Path(__file__).parents[2] / "docs" / "speed.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that are left, write the page, and return the exit status."""
    arguments = _parse(argv)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    is_tiny = arguments.scale == "tiny"
    file = arguments.output_dir / f"{name_run(device_name())}.jsonl"
    for other in sorted(set(arguments.output_dir.glob("*.jsonl")) - {file}):
        done = sum(DONE in said for said in read(other).values())
        sys.stdout.write(f"{other}: other code or another machine, {done} stages\n")
    sys.stdout.write(f"{file}: this run\n")
    with tempfile.TemporaryDirectory() as directory:
        run_stages(file, arguments.stages, arguments.minutes, is_tiny, Path(directory))
    if arguments.page:
        labels = {name: stage.label for name, stage in STAGES.items()}
        table.write(arguments.page, read(file), labels)
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
    parser.add_argument("--minutes", type=float, default=60.0, help="The call ends within them.")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/gpu_first"), help="Gets the lines as JSON."
    )
    parser.add_argument(
        "--page", type=Path, help="Gets the table; default: docs/speed.md, at the real scale."
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.stages) - set(STAGES):
        parser.error(f"no stage {', '.join(sorted(unknown))} among {', '.join(STAGES)}")
    if arguments.scale == "real" and not has_cuda():
        parser.error("--scale real needs a GPU: add --scale tiny")
    if arguments.scale == "real":
        arguments.page = arguments.page or _PAGE
    return arguments


if __name__ == "__main__":
    sys.exit(main())
