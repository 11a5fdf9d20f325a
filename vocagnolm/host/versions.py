"""Versions of Python and of packages that may change a number."""

import platform
from contextlib import suppress
from importlib import metadata

from packaging.requirements import Requirement


def versions(packages: str) -> dict[str, str]:
    """Look up installed packages, given as names with spaces between; leaves out absent ones.

    >>> list(versions("python numpy no-such-package"))
    ['python', 'numpy']
    """
    found = {}
    for package in packages.split():
        with suppress(metadata.PackageNotFoundError):
            is_python = package == "python"
            found[package] = platform.python_version() if is_python else metadata.version(package)
    return found


def check_extra(extra: str) -> None:
    """Raise an ImportError where a package of one of our extras is missing, or another version."""
    for line in metadata.requires("vocagnolm") or ():
        wanted = Requirement(line)
        if not wanted.marker or wanted.marker.evaluate({"extra": ""}):
            continue
        if wanted.marker.evaluate({"extra": extra}):
            found = versions(wanted.name).get(wanted.name, "none")
            if found not in wanted.specifier:
                remedy = f"pip install 'vocagnolm[{extra}]'"
                raise ImportError(
                    f"expected {wanted.name} {wanted.specifier}, found {found}: {remedy}"
                )
