"""Read the rows of a JSON file, one after the other, whatever is wrong with some of its lines.

Input: a path. Output: a dict for each row, or the reason why a line is none. Knows no column.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

# The number of the line, the bytes that it takes, and its object or the reason why it is none.
Row = tuple[int, int, dict[str, Any] | str]

# A line is lenient about control characters, as Arrow's reader is.
_DECODER = json.JSONDecoder(strict=False)
_ZSTD = b"\x28\xb5\x2f\xfd"
_CUT_OFF = "Compressed file ended before the end-of-stream marker was reached"
# One object over several lines is read whole, up to so many bytes.
_MOST_BYTES = 1 << 30
# What a file begins with that is no JSON, and the way out.
_FOREIGN = {
    b"version https://git-lfs": "it is a pointer of Git LFS, not the file: get it by git lfs pull",
    codecs.BOM_UTF16_LE: "it is UTF-16: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16: convert it to UTF-8",
    b"PAR1": "it is a Parquet file: call it .parquet",
}


def read_rows(path: Path) -> Iterator[Row]:
    """Read JSON lines, an array, or one object over several lines, compressed or not.

    Yields the number of the line, from 1, the bytes that it takes, and its object; or the reason
    why it is none. The strings of an array are objects that have them as `text`.

    Raises:
        ValueError: the file is another kind of file, or an array that is damaged.
        EOFError: compressed, it is cut off.
    """
    with open_file(path) as file:
        for begin, reason in _FOREIGN.items():
            if file.peek(64).startswith(begin):  # type: ignore[attr-defined]
                raise ValueError(reason)
        values, size = _read_whole(file)
    if values is not None:
        for value in values:
            yield 1, size // len(values), _as_row(value)
        return
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                yield from _rows_of(number, content)


def _read_whole(file: BinaryIO) -> tuple[list[Any] | None, int]:
    """Read the values of a file that is not one of lines, and its bytes; None of another.

    An array is such a file, and one whose first line is no JSON by itself, but the begin of some.
    """
    line = b""
    while not line.strip():
        line = file.readline()
        if not line:
            return None, 0
        line = line.removeprefix(codecs.BOM_UTF8)
    is_array = line.strip().startswith(b"[")
    if not is_array and not isinstance(_values(line), str):
        return None, 0
    whole = line + file.read(-1 if is_array else _MOST_BYTES)
    values = _values(whole)
    if not isinstance(values, str):
        return values, len(whole)
    if is_array:
        raise ValueError(f"its array is damaged or cut off: {_why_invalid(whole)}")
    return None, 0


def _rows_of(number: int, line: bytes) -> Iterator[Row]:
    values = _values(line)
    if isinstance(values, str):
        yield number, len(line), values
        return
    for value in values:
        yield number, len(line), _as_row(value, is_line=True)


def _values(content: bytes) -> list[Any] | str:
    """Read the JSON values of a line or file; one array stands for its items."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    values, at, end = [], 0, len(text.rstrip())
    try:
        while at < end:
            at += len(text[at : at + 1000]) - len(text[at : at + 1000].lstrip())
            value, at = _DECODER.raw_decode(text, at)
            values.append(value)
    # Brackets in brackets, thousands of them, are no row either.
    except (ValueError, RecursionError):
        return "not valid JSON"
    if len(values) == 1 and isinstance(values[0], list):
        return values[0]
    return values


def _why_invalid(content: bytes) -> str:
    try:
        _DECODER.decode(content.decode().strip())
    except (ValueError, RecursionError) as error:
        return str(error)
    return "there is more behind it"


def _as_row(value: object, *, is_line: bool = False) -> dict[str, Any] | str:
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and not is_line:
        return {"text": value}
    return f"not a JSON object but {type(value).__name__}"


# -- Compression -----------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading; what its first bytes show to be compressed is decompressed."""
    file = path.open("rb")
    magic = file.peek(6)
    if magic.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=file))))
    if magic.startswith(b"BZh"):
        return cast(BinaryIO, io.BufferedReader(cast(Any, bz2.BZ2File(file))))
    if magic.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, io.BufferedReader(cast(Any, lzma.LZMAFile(file))))
    if magic.startswith(_ZSTD):
        return cast(BinaryIO, io.BufferedReader(_ZstdFile(file), 1 << 20))
    return file


class _ZstdFile(io.RawIOBase):
    """Frames of Zstandard, one behind the other: the library says nothing where one is cut off."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._rest = file, b""
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._rest or self._file.read(1 << 17)
            self._rest = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError(_CUT_OFF)
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(compressed)
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        part = self._ready[: len(buffer)]
        self._ready = self._ready[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()
