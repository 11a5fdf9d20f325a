"""Measure the claims, and fail if one does not hold.

    python -m benchmarks                        # all, in ten minutes on two cores
    python -m benchmarks alignment steps        # some
    python -m benchmarks preparation --set documents=500 corpus=FILE.jsonl student=DIR teacher=DIR
    python -m benchmarks --page benchmarks/CLAIMS.md    # what `make bench` does
    python -m benchmarks --tiny                 # the smallest size: does it run?

Prints one table: claim, limit, measured value, whether it holds, command. The exit status is 1 if a
claim does not hold or a measurement fails. A measurement that needs something that is missing here
(a GPU, TRL, pretrained models) is skipped, and a line says so.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

from benchmarks import claims
from benchmarks.harness import Skipped
from benchmarks.page import Page


def main(argv: Sequence[str] | None = None) -> int:
    """Measure from the command line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Check the claims.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {' '.join(claims.NAMES)}")
    parser.add_argument("--tiny", action="store_true", help="the smallest size: does it run?")
    parser.add_argument("--page", type=Path, help="write the results between its marks, too")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="other sizes of one measurement"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(claims.NAMES):
        parser.error(f"no {', '.join(sorted(unknown))} among {' '.join(claims.NAMES)}")
    known = claims.load()
    page = Page(arguments.page)
    sizes = {}
    for name in arguments.names or known:
        size = known[name].TINY if arguments.tiny else known[name].FULL
        try:
            sizes[name] = resize(size, arguments.set)
        except ValueError as error:
            parser.error(f"--set of {name}: {error}")
    for name, size in sizes.items():
        _measure(name, known[name], size, page)
        page.write()  # at once, because the next one may fail
    sys.stdout.write(page.text() + "\n")
    return int(page.failed)


def _measure(name: str, module: ModuleType, size: object, page: Page) -> None:
    try:
        measured = module.measure(size)
    except Skipped as reason:
        page.lines.append(f"{name} skipped: {reason}")
        return
    except Exception as error:  # noqa: BLE001 - the other measurements still run
        page.failed = True
        traceback.print_exc()
        page.lines.append(f"{name} failed: {type(error).__name__}: {error}")
        return
    page.add(name, module.CLAIMS, measured)
    sys.stderr.writelines(f"{name}: {line}\n" for line in measured.details)


def resize(size: object, given: Sequence[str]) -> object:
    """Return a size with other values.

    Raises:
        ValueError: the size has no such name, or the value has another type.
    """
    types = {item.name: type(getattr(size, item.name)) for item in fields(size)}
    changes = {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in types:
            raise ValueError(f"no {name} among {', '.join(types)}")
        changes[name] = types[name](value)
    return replace(size, **changes)


if __name__ == "__main__":
    sys.exit(main())
