"""Versions of Python and of packages that may change a number."""

import platform
from contextlib import suppress
from importlib import metadata


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
