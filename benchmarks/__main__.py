"""Measure the claims, and fail where one does not hold.

    python -m benchmarks                        # all
    python -m benchmarks alignment --set documents=500
    python -m benchmarks --small --page docs/benchmarks.md    # what `make bench` does
    python -m benchmarks --tiny                 # seconds; says nothing about the claims
    python -m benchmarks --list

Prints one table: claim, limit, measured, holds. The exit status is 1 where a claim does not hold.
A claim that cannot be measured here (no GPU, no data) is skipped with a line: it is not held.
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
from benchmarks.page import Page, around


def main(argv: Sequence[str] | None = None) -> int:
    """Measure from the command line and return the exit status."""
    known = claims.load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Check the claims.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims; default: all")
    parser.add_argument("--list", action="store_true", help="name the claims and measure none")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--small", action="store_true", help="in minutes, where a claim has it")
    either.add_argument("--tiny", action="store_true", help="the smallest size: does it run?")
    parser.add_argument("--page", type=Path, help="write the results between its marks, too")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="other sizes of one claim"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(known):
        parser.error(f"no claim {', '.join(sorted(unknown))} among {', '.join(known)}")
    if arguments.list:
        width = max(map(len, known))
        lines = [f"{name:{width}}  {each.CLAIM.says}" for name, each in known.items()]
        sys.stdout.write("\n".join(lines) + "\n")
        return 0
    sizes: dict[str, object] = {}
    where = "--page"
    try:
        if arguments.page:
            around(arguments.page)  # not after minutes of work
        for name in arguments.names or known:
            where = f"--set of {name}"
            sizes[name] = resize(_size(known[name], arguments), arguments.set)
    except ValueError as error:
        parser.error(f"{where}: {error}")
    page = Page()
    for name, size in sizes.items():
        _measure(name, known[name], size, page)
        if arguments.page:
            page.write(arguments.page)  # at once: the next one may fail
    if page.rows:
        sys.stdout.write(page.table() + "\n")
    sys.stdout.writelines(f"{line}\n" for line in page.skipped)
    return int(page.failed)


def _measure(name: str, module: ModuleType, size: object, page: Page) -> None:
    try:
        measured = claims.measure(module, size)
    except Skipped as reason:
        page.skipped.append(f"{name} skipped: {reason}")
        return
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        page.failed = True
        traceback.print_exc()
        page.skipped.append(f"{name} failed: {type(error).__name__}: {error}")
        return
    details = page.add(name, module.CLAIM, measured)
    sys.stderr.writelines(f"{name}: {line}\n" for line in details)


def _size(module: ModuleType, arguments: argparse.Namespace) -> object:
    if arguments.tiny:
        return module.TINY
    return getattr(module, "SMALL", module.FULL) if arguments.small else module.FULL


def resize(size: object, given: Sequence[str]) -> object:
    """Return a size with other values.

    Raises:
        ValueError: a name that the size does not have, or a value of another type.
    """
    types = {item.name: type(getattr(size, item.name)) for item in fields(size)}  # type: ignore[arg-type]
    changes = {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in types:
            raise ValueError(f"no {name} among {', '.join(types)}")
        changes[name] = types[name](value)
    return replace(size, **changes)  # type: ignore[type-var]


if __name__ == "__main__":
    sys.exit(main())
