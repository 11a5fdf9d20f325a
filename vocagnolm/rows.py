"""Read the rows of a file of JSON, comma-separated values or text, whatever is wrong with some.

The input is a path. The output is a dict for each row, or the reason why it is skipped. This module
does not know which columns are read.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

# The number of a row's line, and its fields or the reason why it is skipped.
Row = tuple[int, dict[str, Any] | str]

# What a file of each suffix holds. The suffix of a compression may follow.
KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
# The most characters of a field of a CSV file. Python's own limit is shorter than many documents.
_MAX_FIELD = 1 << 30


def kind_of(path: Path) -> str:
    """Name what a file holds by its suffix, or return "" if it is not read."""
    if path.suffix.lower() in _COMPRESSIONS:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower(), "")


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file that is not a table of Arrow.

    Yields the number of each row's first line, from 1, and its fields or why it is skipped.

    Raises:
        ValueError: the file is damaged as a whole.
        EOFError: the file is compressed and cut off. For Zstandard, it is an OSError.
    """
    kind = kind_of(path)
    with _open(path) as file:
        if kind == "json":
            yield from _json_rows(file)
        elif kind == "csv":
            separator = "\t" if ".tsv" in path.name.lower() else ","
            yield from _csv_rows(file, separator)
        else:
            # Line feeds become its line ends.
            content = file.read().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            yield 1, {"text": content}


def _json_rows(file: BinaryIO) -> Iterator[Row]:
    """Read JSON lines, or one array of objects."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.lstrip().startswith(b"["):
                for item in json.loads(line + file.read(), strict=False):
                    yield 1, _object(item)
                return
        if line.strip():
            yield number, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | str:
    """Parse a line of JSON, or return why it is skipped."""
    try:
        # Control characters in strings are accepted, as in Arrow's reader.
        return _object(json.loads(line.decode(), strict=False))
    except UnicodeDecodeError:
        return "not valid UTF-8"
    # Thousands of nested brackets exceed the recursion limit.
    except (ValueError, RecursionError):
        return "not valid JSON"


def _object(value: object) -> dict[str, Any] | str:
    """Return a JSON object, or why another value is skipped."""
    return value if isinstance(value, dict) else f"not a JSON object but {type(value).__name__}"


def _csv_rows(file: BinaryIO, separator: str) -> Iterator[Row]:
    """Read the rows of a table with a header. Every field is a text, so 007 and NA stay."""
    csv.field_size_limit(_MAX_FIELD)
    lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    # Without `strict`, text after a closing quote would lose its quotes.
    records = csv.reader(lines, delimiter=separator, strict=True)
    number = 1
    try:
        columns = next(records, [])
        number = records.line_num + 1
        for fields in records:
            # With more or fewer fields than the header, nobody knows where the text begins and
            # ends. A blank line has no fields.
            if len(fields) == len(columns):
                yield number, dict(zip(columns, fields, strict=True))
            elif fields:
                yield number, f"{len(fields)} fields, where the header has {len(columns)}"
            number = records.line_num + 1
    except csv.Error as error:
        raise ValueError(f"line {number}: not valid CSV: {error}") from None


def _open_zstandard(path: Path, mode: str) -> BinaryIO:
    """Open a file of Zstandard for reading. Unlike others, Arrow's stream refuses one cut off."""
    stream: Any = pa.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream, 1 << 20)


# Who opens a file that begins with these bytes. The last ones are those of parallel tools.
_OPENERS: dict[bytes, Callable[[Path, str], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
    b"\x28\xb5\x2f\xfd": _open_zstandard,
    b"\x50\x2a\x4d\x18": _open_zstandard,
}


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if its first bytes show a compression.

    The suffix is ignored, because files are renamed more often than compressed again.
    """
    file = path.open("rb")
    start = file.peek(6)
    for magic, open_file in _OPENERS.items():
        if start.startswith(magic):
            file.close()
            return cast(BinaryIO, open_file(path, "rb"))
    return file
