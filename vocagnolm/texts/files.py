"""Data sets in files of known formats, found at any depth, or on the hub; read by `datasets`."""

import glob
import logging
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import zstandard
from datasets.exceptions import DatasetsError
from datasets.utils import tqdm

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Raised by `datasets` on bad data: StopIteration on a file without documents, and what
# decompression raises, as it comes.
_UNREADABLE = (
    *(DatasetsError, OSError, ValueError, TypeError, StopIteration),
    *(EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError),
)


def local_path(dataset: str, option: str) -> Path | None:
    """Return the path that a name is here, None for one that the hub is to be asked for."""
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or dataset.startswith((".", "~")) or _builder(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    return None


def read_files(path: Path, option: str) -> Iterator[tuple[Path, datasets.Dataset]]:
    """Read a file, or each file of a directory, in a stable order."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if _builder(file)]
    if not files:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"{option} {path}: expected files ending in {known} (also compressed)")
    # One by one, since their formats and other columns may differ.
    for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
        builder = _builder(file)
        options = {"sample_by": "document"} if builder == "text" else {}
        # Escaped, since file names count as patterns.
        name = glob.escape(str(file))
        yield file, _read(builder, f"{option} {file}", data_files=name, split="train", **options)


def read_hub(dataset: str, option: str, **options: object) -> datasets.Dataset:
    """Read a data set of the hub."""
    shown = f"{option} {dataset} (no file or directory here, so a hub dataset)"
    return _read(dataset, shown, **options)


def _builder(path: Path) -> str:
    """Name the builder that reads a file, "" for none."""
    suffixes = ["", *path.suffixes]
    if suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return _BUILDERS.get(suffixes[-1], "")


def _read(builder: str, shown: str, **options: Any) -> datasets.Dataset:
    # Its errors come back as one line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(builder, **options)
    except _UNREADABLE as error:
        # The library wraps the error whose message helps the user.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            reason = "it holds no documents, or is cut off"
        raise ValueError(f"{shown} cannot be read: {reason}") from error
