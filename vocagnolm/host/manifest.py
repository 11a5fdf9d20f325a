"""A directory that is complete or not: a manifest, written last, knows every byte of its files."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from vocagnolm.host.files import ASIDE, file_sha256, read_json, write_json

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_THREADS = 4
_FILES_OF_THE_SYSTEM = (".nfs", ".DS_Store")  # how their names begin; they come and go


def write_manifest(
    directory: Path, about: Mapping[str, Any], expected: Collection[str] = ()
) -> None:
    """Declare a directory complete, when all that is in it is on the disk.

    Args:
        directory: with its files, in subdirectories too.
        about: what else the manifest says.
        expected: names that are there for certain, even where a network file system lists them
            later.
    """
    names = sorted({*written_files(directory), *expected})
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(partial(file_sha256, flush=True), (directory / name for name in names))
        files = {
            name: {"bytes": (directory / name).stat().st_size, "sha256": sha256}
            for name, sha256 in zip(names, hashes, strict=True)
        }
    for place in {(directory / name).parent for name in names}:
        _flush_directory(place)
    write_json(directory / MANIFEST_FILE, {"format": _FORMAT, **about, "files": files})
    for place in (directory, directory.parent):
        _flush_directory(place)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a manifest says.

    Raises:
        ValueError: there is none, or it is damaged or of another version.
    """
    path = directory / MANIFEST_FILE
    if not path.exists():
        raise ValueError(f"it has no {MANIFEST_FILE}, so it was not finished or is another tool's")
    try:
        manifest = read_json(path)
    except ValueError as error:
        raise ValueError(f"{MANIFEST_FILE} is damaged") from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{MANIFEST_FILE} has format {manifest.get('format')}, not {_FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_described, files.values())):
        raise ValueError(f"{MANIFEST_FILE} is damaged")
    return manifest


def content_fault(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with the files of a directory, of which every byte is read; None if nothing."""
    places = {str(Path(name).parent) for name in files}  # others are those of an evaluation
    found = {name for name in written_files(directory) if str(Path(name).parent) in places}
    for name in sorted(files.keys() ^ found):
        return f"{name} is missing" if name in files else f"{name} does not belong to it"
    for name, expected in files.items():
        size = (directory / name).stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size:,} bytes instead of {expected['bytes']:,}"
    with ThreadPoolExecutor(_THREADS) as pool:
        hashes = pool.map(file_sha256, (directory / name for name in files))
        for (name, expected), sha256 in zip(files.items(), hashes, strict=True):
            if sha256 != expected["sha256"]:
                pool.shutdown(wait=False, cancel_futures=True)
                return f"{name} is damaged: its checksum is another"
    return None


def content_bytes(manifest: Mapping[str, Any]) -> int:
    """The size of all files of a manifest."""
    return sum(file["bytes"] for file in manifest["files"].values())


def _is_described(file: object) -> bool:
    return (
        isinstance(file, dict)
        and isinstance(file.get("bytes"), int)
        and isinstance(file.get("sha256"), str)
    )


def written_files(directory: Path) -> set[str]:
    """The names of the files below a directory, but for the manifest and what is half-written."""
    names = {
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file()
        and not path.name.startswith(_FILES_OF_THE_SYSTEM)
        and not (path.name.startswith(".") and path.name.endswith(ASIDE))
    }
    return names - {MANIFEST_FILE}


def _flush_directory(directory: Path) -> None:
    """See to it that names are on the disk, not only what they stand for."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
