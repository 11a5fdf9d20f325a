"""Print the versions of this environment as constraints: `make lock`.

    python tests/support/lock.py > constraints.txt

Versions have no hashes and no suffix of a machine's build (torch 2.13.0+cpu is 2.13.0), so that one
file serves every machine. Where the oldest Python cannot use a version, pip chooses another.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import distributions

from packaging.specifiers import SpecifierSet

HEAD = "# What the demo and the tests are run with; pip install -c constraints.txt -e ."
OLDEST, NEWEST = 10, 20
_NOT_LOCKED = {"vocagnolm", "pip"}


def main() -> None:
    """Print the file."""
    lines = {}
    for found in distributions():
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        if name not in _NOT_LOCKED:
            version = found.version.partition("+")[0]
            lines[name] = f"{name}=={version}{marker(found.metadata.get('Requires-Python'))}"
    sys.stdout.write("\n".join([HEAD, *(lines[name] for name in sorted(lines)), ""]))


def marker(requires: str | None) -> str:
    """Limit a version to the Pythons that can use it, unless our oldest can."""
    accepted = SpecifierSet(requires or "")
    minors = (minor for minor in range(OLDEST, NEWEST) if accepted.contains(f"3.{minor}.99"))
    first = next(minors)
    return f' ; python_version >= "3.{first}"' if first > OLDEST else ""


if __name__ == "__main__":
    main()
