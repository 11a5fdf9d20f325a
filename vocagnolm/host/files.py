"""Files that are there completely or not at all, whatever happens to who writes them."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

_CHUNK_BYTES = 1 << 22
ASIDE = ".tmp"  # the end of the name of a file that is not complete; such names begin with a dot


def write_file(path: Path, write: Callable[[BinaryIO], object], *, replace: bool = True) -> None:
    """Write a file completely or not at all.

    Args:
        path: of the file.
        write: what writes the content to an open file.
        replace: a file that is there; otherwise it stays, and nothing is written.
    """
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{ASIDE}")  # two may write the same file
    with aside.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())  # on the disk before its name is
    try:
        if replace:
            aside.replace(path)
        else:
            os.link(aside, path)
    except FileExistsError:
        pass  # another one was first
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        if not path.exists():
            aside.replace(path)
    aside.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any], *, replace: bool = True) -> None:
    """Write a JSON object completely or not at all."""
    write_file(path, lambda file: file.write(json_bytes(content)), replace=replace)


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """A JSON object as `write_json` writes it."""
    return (json.dumps(content, indent=1) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # bad UTF-8 too
        raise ValueError(f"{path} is damaged: it is no JSON ({error}); get it again") from error
    if not isinstance(content, dict):
        found = type(content).__name__
        raise ValueError(f"{path} is damaged: expected an object, found {found}; get it again")
    return content


def json_or_empty(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty if there is none, or something else."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def file_sha256(path: Path, *, flush: bool = False) -> str:
    """The SHA-256 of a file, of which all is on the disk afterwards if that is asked for."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_writable(output_dir: Path) -> None:
    """Refuse a place for results before the work is done.

    Raises:
        ValueError: it, or what it would be in, is a file or cannot be written to.
    """
    place = next(place for place in (output_dir, *output_dir.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"--output_dir {output_dir}: {place} is a file, not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {output_dir}: {place} cannot be written to")
