"""Measure the claims, and fail where one does not hold.

    python -m benchmarks                        # all
    python -m benchmarks alignment --set documents=500
    python -m benchmarks --tiny                 # seconds; says nothing about the claims
    python -m benchmarks --list

Prints one table: claim, limit, measured, holds. The exit status is 1 where a claim does not hold.
A claim that cannot be measured here (no GPU, no data) is skipped with a line: it is not held.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from benchmarks import claims
from benchmarks.harness import Skipped
from vocagnolm.host.tables import markdown_table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure from the command line and return the exit status."""
    known = claims.load()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Check the claims.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims; default: all")
    parser.add_argument("--list", action="store_true", help="name the claims and measure none")
    parser.add_argument("--tiny", action="store_true", help="the smallest size: does it run?")
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
    rows, skipped, failed = [], [], False
    for name in arguments.names or known:
        module = known[name]
        claim = module.CLAIM
        try:
            size = resize(module.TINY if arguments.tiny else module.FULL, arguments.set)
        except ValueError as error:
            parser.error(f"--set of {name}: {error}")
        try:
            measured = claims.measure(module, size)
        except Skipped as reason:
            skipped.append(f"{name} skipped: {reason}")
            continue
        holds = claim.holds(measured.value) and not measured.broken
        failed |= not holds
        verdict = "yes" if holds else f"NO {measured.broken}".strip()
        rows.append([name, claim.says, claim.limit, claim.show(measured.value), verdict])
        sys.stderr.writelines(f"{name}: {line}\n" for line in measured.details)
    if rows:
        header = ["name", "claim", "limit", "measured", "holds"]
        sys.stdout.write(markdown_table([header, *rows]) + "\n")
    sys.stdout.writelines(f"{line}\n" for line in skipped)
    return int(failed)


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
