"""Data sets in files of known formats: found at any depth, told from names on the hub, and read.

Whatever `datasets` cannot read is a ValueError of one line that says what to do.
"""

import glob
import logging
import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import zstandard
from datasets.exceptions import DatasetsError
from datasets.utils import tqdm

from vocagnolm.texts.json_lines import read_json_lines

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Raised by `datasets` on bad data; StopIteration on a file without documents.
_LIBRARY_ERRORS = (DatasetsError, OSError, ValueError, TypeError, StopIteration)
# These pass through it; only a bad .bz2 or a .gz with a bad checksum is an OSError.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def local_path(dataset: str, option: str) -> Path | None:
    """Return the path that a name is here, None for one that the hub is to be asked for."""
    path = Path(dataset).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or dataset.startswith((".", "~")) or _format(path):
        raise ValueError(f"{option} {dataset}: no such file or directory")
    return None


def read_files(
    path: Path, split: str, config_name: str | None, option: str, text_column: str
) -> Iterator[tuple[Path, datasets.Dataset]]:
    """Read a file, or each file of a directory, in a stable order."""
    if config_name:
        raise ValueError(
            f"--dataset_config {config_name}: local files have no configurations, expected "
            f"none (or '' among several) for {option} {path}"
        )
    if split != "train":
        raise ValueError(
            f"--dataset_split {split}: local files have only the split train, "
            f"give the files of one split to {option}"
        )
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if _format(file)]
    # The library reads one format at a time.
    kinds = sorted({_format(file) for file in files})
    if not kinds:
        known = ", ".join(_BUILDERS)
        raise ValueError(f"{option} {path}: expected files ending in {known} (also compressed)")
    if len(kinds) > 1:
        raise ValueError(
            f"{option} {path}: holds several formats ({', '.join(kinds)}); "
            "give a directory with one of them"
        )
    option_of = {"text": {"sample_by": "document"}, "json": {"text_column": text_column}}
    options = {"split": split, **option_of.get(kinds[0], {})}
    # One by one, since their other columns may differ; escaped, since file names count as patterns.
    for file in tqdm(files, desc="Reading files", disable=len(files) == 1):
        name = glob.escape(str(file))
        yield file, _read(kinds[0], f"{option} {file}", data_files=name, **options)


def read_hub(dataset: str, option: str, **options: object) -> datasets.Dataset:
    """Read a data set of the hub."""
    shown = f"{option} {dataset} (no file or directory here, so a hub dataset)"
    return _read(dataset, shown, **options)


def _format(path: Path) -> str:
    """Name the builder that reads a file, "" for none."""
    suffixes = ["", *path.suffixes]
    if suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return _BUILDERS.get(suffixes[-1], "")


def _read(builder: str, shown: str, **options: Any) -> datasets.Dataset:
    # Its errors come back as one line.
    logging.getLogger("datasets").setLevel(logging.CRITICAL)
    try:
        is_json = "text_column" in options
        read = read_json_lines if is_json else partial(datasets.load_dataset, builder)
        return read(**options)
    except (*_LIBRARY_ERRORS, *_DECOMPRESSION_ERRORS) as error:
        # The library wraps the error whose message helps the user.
        reason = " ".join(str(error.__cause__ or error).split())
        if not reason or "corresponds to no data" in reason:
            compressed = shown.endswith(_COMPRESSIONS)
            reason = "it is empty or cut off" if compressed else "it holds no documents"
        raise ValueError(f"{shown} cannot be read: {reason}") from error
