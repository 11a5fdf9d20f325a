"""Writes files that are complete or absent, and prints a job's messages once.

It also formats reasons, versions and tables. It does not import torch.
"""

import errno
import gzip
import hashlib
import json
import os
import platform
import re
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import yaml

from vocagnolm.fields import OptionError

JsonObject = dict[str, Any]
# The package's data: tables, templates, the demo's models.
ASSETS = Path(__file__).parents[1] / "assets"
# In a run's directory: its settings and its log. In a complete directory: the sizes of its files.
RUN_FILE, LOG_FILE, MANIFEST_FILE = "run.json", "log.jsonl", "manifest.json"
# The file and line with which a reason may begin.
_IS_PLACE = re.compile(r".+:\d+")
# The end of an incomplete file's name, which begins with a dot.
TEMPORARY = ".tmp"


def write_file(path: Path, write: Callable[[BinaryIO], object], *, replace: bool = True) -> None:
    """Write a file completely or not at all. Without `replace`, keep an existing one."""
    # Two processes may write the same file, so each has its own temporary file. It is in the same
    # directory, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            # The bytes must reach the disk before the name does, or a crash could leave an empty
            # file.
            os.fsync(file.fileno())
        # From here on, readers see the old file or the new one, never a part.
        if not replace:
            # Unlike a rename, a hard link fails if the name is taken. Some systems have no hard
            # links.
            with suppress(OSError):
                os.link(temporary, path)
        if replace or not path.exists():
            temporary.replace(path)
    except OSError as error:
        # Errors of a write or of fsync name no file, and a message must name it.
        error.filename = error.filename or str(path)
        raise
    # Also after an error, because a partial file would keep a full disk full.
    finally:
        temporary.unlink(missing_ok=True)


def share_weights(directory: Path) -> None:
    """Give files of weights the mode of other files. safetensors 0.8 hides them from all others."""
    # The mask can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o666 & ~mask)


# What the system says when a disk is full.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def disk_fault(error: BaseException) -> str | None:
    """Return what the system says if an error, or its cause, is about a full disk, else None."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return os.strerror(error.errno)
    text = str(error)
    # safetensors is written in Rust and raises its own error, with the number in its text.
    match = re.search(r"os error (\d+)", text)
    if match and int(match[1]) in _DISK_ERRORS:
        return os.strerror(int(match[1]))
    # PyTorch names the source file of its archive writer, and says nothing about the disk.
    if isinstance(error, RuntimeError) and "inline_container.cc" in text:
        return "the disk is full, or cannot be written to"
    return disk_fault(error.__cause__) if error.__cause__ else None


@contextmanager
def explain_full_disk(path: Path, advice: Callable[[], str]) -> Iterator[None]:
    """Turn what libraries raise on a full disk into one OSError: where, why, and what is safe."""
    try:
        yield
    except Exception as error:
        reason = disk_fault(error)
        # These may be nested. The innermost knows best what is safe.
        if reason is None or isinstance(error, FullDiskError):
            raise
        raise FullDiskError(f"{path} cannot be written to: {reason}. {advice()}") from error


class FullDiskError(OSError):
    """A disk is full. The message says what is safe."""


def write_text(path: Path, text: str) -> None:
    """Write a text file, compressed if its name ends in .gz. Its directory is made."""
    content = text.encode()
    if path.suffix == ".gz":
        # Without a time in the file, equal texts make equal files.
        content = gzip.compress(content, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda file: file.write(content))


def write_json(path: Path, content: Mapping[str, object], *, replace: bool = True) -> None:
    """Write a JSON object completely or not at all."""
    text = json.dumps(content, indent=1) + "\n"
    write_file(path, lambda file: file.write(text.encode()), replace=replace)


def read_json(path: Path) -> JsonObject:
    """Read a JSON object. A ValueError says that the file is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged (not JSON: {error}): get a new copy") from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(f"{path} is damaged (expected an object, found {kind}): get a new copy")
    return content


class _Loader(yaml.SafeLoader):
    """Loads YAML. Of a name that comes twice, the last value would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a mapping of a node."""
        names = [str(name.value) for name, _ in node.value]
        if len(set(names)) < len(names):
            raise yaml.YAMLError(f"{max(names, key=names.count)} comes twice: leave one out")
        return super().construct_mapping(node, deep)


def read_mapping(option: str, path: str | Path) -> dict[str, Any]:
    """Read a YAML file of names and values, which an option names."""
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise OptionError(option, f"{path} cannot be read ({error})") from error
    if not (isinstance(content, dict) and content):
        raise OptionError(option, f"{path} must be a mapping of names to values")
    return {str(name): value for name, value in content.items()}


def json_or_empty(path: Path) -> JsonObject:
    """Read a JSON object, or return {} if the file is missing or has anything else."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def file_sha256(path: Path) -> str:
    """Hash a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # Read piece by piece, because weights may be larger than the memory.
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def size_fault(directory: Path, files: Mapping[str, int]) -> str | None:
    """Name the first file that is missing or has another size, or return None."""
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected:
            return f"{name} has {size:,} bytes instead of {expected:,}"
    return None


def count_reasons(reasons: Iterable[str]) -> str:
    """Return the three most frequent reasons for leaving a document out, with counts.

    Lines of files are counted together, and the first one is named.

    >>> count_reasons(["empty", "a.jsonl:3: not valid JSON", "a.jsonl:9: not valid JSON"])
    '2 not valid JSON (a.jsonl:3, ...), 1 empty'
    """
    counts: Counter[str] = Counter()
    places: dict[str, str] = {}
    for reason in reasons:
        place, colon, kind = reason.partition(": ")
        # A reason may contain another colon, which does not follow a file and a line.
        if not (colon and _IS_PLACE.fullmatch(place)):
            place, kind = "", reason
        counts[kind] += 1
        if place:
            places.setdefault(kind, place)
    lines = []
    for kind, count in counts.most_common(3):
        more = ", ..." if count > 1 else ""
        place = f" ({places[kind]}{more})" if kind in places else ""
        lines.append(f"{count:,} {kind}{place}")
    return ", ".join(lines)


def versions(packages: str) -> dict[str, str]:
    """Look up the versions of packages, given as names with spaces between. Skip absent ones.

    >>> list(versions("python numpy no-such-package"))
    ['python', 'numpy']
    """
    installed = {}
    for package in packages.split():
        if package == "python":
            installed[package] = platform.python_version()
            continue
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def markdown_table(rows: Sequence[Sequence[str]], *, padded: bool = True) -> str:
    r"""Format rows, the first of which is the header. `padded` columns suit a terminal, too.

    >>> print(markdown_table([["method", "loss"], ["a|b", "1.25"]]))
    | method | loss |
    |--------|------|
    | a\|b   | 1.25 |
    """
    cells = []
    for row in rows:
        cells.append([cell.replace("|", r"\|") for cell in row])
    widths = []
    dashes = []
    for column in zip(*cells, strict=True):
        width = max(map(len, column)) if padded else 0
        widths.append(width)
        # The rule includes the spaces around a cell, and Markdown needs three dashes.
        dashes.append("-" * (width + 2) if padded else "---")
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, f"|{'|'.join(dashes)}|")
    return "\n".join(lines)


# -- Messages --------------------------------------------------------------------------------------


def is_main() -> bool:
    """Return True in the first process of a job, before and after the processes are connected."""
    # A launcher sets RANK in each process. Without a launcher there is only one process.
    return os.environ.get("RANK", "0") == "0"


def print_main(text: str | None, file: TextIO | None = None) -> None:
    """Print a result once per job; nothing for None and ""."""
    if text and is_main():
        print(text, file=file, flush=True)


def log_main(text: str | None) -> None:
    """Print on stderr whatever is not a result, once per job."""
    # Stdout has only results, so that it can be piped into a file or another program.
    print_main(text, sys.stderr)
