"""Kills of whatever writes, before or after any of the operations that change a directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """Ends what runs as SIGKILL would: no code of the package catches it."""


def kill_at(patch: pytest.MonkeyPatch, at: int, *, before: bool) -> list[str]:
    """Kill before or after the operation of this number that changes a directory.

    Returns a list that gets the names of the operations.
    """
    operations: list[str] = []

    def wrap(owner: Any, name: str) -> None:
        # A real fsync would take long.
        original = getattr(owner, name) if name != "fsync" else int

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and "w" not in str(args[1:]):
                return original(*args, **kwargs)
            operations.append(name)
            is_last = len(operations) == at
            if is_last and before:
                raise Killed
            try:
                return original(*args, **kwargs)
            finally:
                if is_last:
                    raise Killed

        patch.setattr(owner, name, wrapped)

    for name in ("link", "fsync"):
        wrap(os, name)
    for name in ("replace", "rename", "unlink", "open"):
        wrap(Path, name)
    wrap(shutil, "rmtree")
    return operations
