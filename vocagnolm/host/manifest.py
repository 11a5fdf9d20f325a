"""A directory that is complete or not: its manifest, written last, knows every byte of its files.

    {"format": 1, ..., "files": [{"file": "a/b.pt", "sha256": "...", "bytes": 12}, ...],
     "sha256": "..."}

Checkpoints, exports and teacher-loss stores have one; a store calls its files "shards". The last
entry is a checksum of all others. An earlier layout of checkpoints is read, too: it has
{name: {"bytes", "sha256"}} under "files", and no checksum of the manifest.
"""

import hashlib
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import TypedDict

from vocagnolm.io import ASIDE, JsonObject, file_sha256, json_bytes, read_json, write_json

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
FILES, SHARDS = "files", "shards"
Manifest = JsonObject
# Increase when a directory written now cannot be read like one written before.
_FORMAT = 1
_THREADS = min(8, os.cpu_count() or 1)


class FileEntry(TypedDict):
    """A file in a manifest; a store adds more about a shard."""

    file: str
    sha256: str
    bytes: int


def write_manifest(
    directory: Path, about: Mapping[str, object], names: Collection[str] | None = None
) -> None:
    """Declare a directory complete, once all files in it, or those named, are on the disk.

    `about` is for further entries.
    """
    names = sorted(written_files(directory) if names is None else names)

    def describe(name: str) -> FileEntry:
        path = directory / name
        sha256 = file_sha256(path, flush=True)
        return {"file": name, "sha256": sha256, "bytes": path.stat().st_size}

    with ThreadPoolExecutor(_THREADS) as pool:
        entries = list(pool.map(describe, names))
    # First the names of the files, then the manifest, then its name and that of the directory: a
    # crash in between leaves a directory without a manifest, never a manifest without its files.
    _flush_names(*{(directory / name).parent for name in names})
    seal(directory, about, FILES, entries)
    _flush_names(directory, directory.parent)


def seal(directory: Path, about: Mapping[str, object], key: str, entries: Sequence[object]) -> None:
    """Write the manifest of files that are described and on the disk, as FILES or as SHARDS."""
    write_json(directory / MANIFEST_FILE, sealed({"format": _FORMAT, **about, key: entries}))


def sealed(content: Mapping[str, object]) -> JsonObject:
    """Give a JSON object a checksum of all its other entries, as the last one."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return rest | {"sha256": manifest_sha256(rest)}


def unsealed(content: JsonObject) -> JsonObject:
    """Take off the checksum, where there is one; a ValueError where it is that of other content."""
    if "sha256" in content and content != sealed(content):
        raise ValueError("expected content that matches its own checksum, found other content")
    return {name: value for name, value in content.items() if name != "sha256"}


def manifest_sha256(manifest: Mapping[str, object]) -> str:
    """Checksum of a manifest, without its entry "sha256"."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path, key: str = FILES) -> Manifest:
    """Read a manifest, less its checksum; a ValueError says that it is missing or damaged.

    It describes its files under `key`: FILES or SHARDS.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise ValueError(f"it has no {MANIFEST_FILE}, so it was not finished or is another tool's")
    try:
        manifest = read_json(path)
    except ValueError as error:
        raise ValueError(f"{MANIFEST_FILE} is damaged") from error
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"{MANIFEST_FILE} has format {manifest.get('format')!r}, not {_FORMAT}")
    files = manifest.get(FILES)
    if isinstance(files, dict) and all(isinstance(entry, dict) for entry in files.values()):
        logger.warning(
            "%s is of an earlier version: it has no checksum of itself, only of the files", path
        )
        manifest[FILES] = [{"file": name, **entry} for name, entry in files.items()]
    else:
        # Byte for byte, so that nothing hides behind what JSON ignores or overwrites.
        if manifest != sealed(manifest) or path.read_bytes() != json_bytes(manifest):
            raise ValueError(f"{MANIFEST_FILE} is damaged: it does not match its own checksum")
        del manifest["sha256"]
    found = manifest.get(key)
    if not (isinstance(found, list) and all(map(_is_entry, found))):
        raise ValueError(f"{MANIFEST_FILE} is damaged: it does not describe its {key}")
    return manifest


def _is_entry(entry: object) -> bool:
    match entry:
        case {"file": str(file), "sha256": str(), "bytes": int()}:
            # Even with right checksums it must not lead to files elsewhere, and have them removed.
            path = PurePosixPath(file)
            return not path.is_absolute() and ".." not in path.parts
    return False


def find_faults(directory: Path, entries: Iterable[FileEntry]) -> Iterator[tuple[str, str]]:
    """Yield the name of every bad file with the reason: first by size, then by checksum."""
    sized = []
    for entry in entries:
        path = directory / entry["file"]
        if not path.is_file():
            yield entry["file"], "is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            yield entry["file"], f"has {size:,} bytes instead of {entry['bytes']:,}"
        else:
            sized.append(entry)
    pool = ThreadPoolExecutor(_THREADS)
    try:
        hashes = pool.map(file_sha256, (directory / entry["file"] for entry in sized))
        for entry, sha256 in zip(sized, hashes, strict=True):
            if sha256 != entry["sha256"]:
                yield entry["file"], "does not match its checksum"
    finally:
        # One fault may be enough for the caller: the rest need not be read.
        pool.shutdown(cancel_futures=True)


def content_fault(directory: Path, manifest: Manifest) -> str | None:
    """Read every byte of a directory and return its first fault; None if it is as written."""
    known = {entry["file"] for entry in manifest[FILES]}
    # A file that the manifest does not know is a fault, but not in a subdirectory of its own, such
    # as an evaluation's.
    places = {Path(name).parent for name in known}
    found = {name for name in written_files(directory) if Path(name).parent in places}
    if extra := sorted(found - known):
        return f"{extra[0]} does not belong to it"
    for name, fault in find_faults(directory, manifest[FILES]):
        return f"{name} {fault}"
    return None


def written_files(directory: Path) -> set[str]:
    """List the files below a directory, without the manifest and incomplete files."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    # The first two are the system's, which come and go.
    passing = (".nfs*", ".DS_Store*", f".*{ASIDE}")
    kept = (path for path in paths if not any(map(path.match, passing)))
    return {path.relative_to(directory).as_posix() for path in kept} - {MANIFEST_FILE}


def _flush_names(*directories: Path) -> None:
    """Flush the names in directories to the disk; flushing a file does not flush its name."""
    for directory in directories:
        handle = os.open(directory, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
