"""Reads the rows of a JSON file one by one, whatever is wrong with some of its lines.

The input is a path. The output is a dict for each row, or the reason why a line is no row. This
module knows nothing about columns.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

# The number of the line, its bytes, and its object or the reason why it has none.
Row = tuple[int, int, dict[str, Any] | str]

# Control characters in strings are accepted, as in Arrow's reader.
_DECODER = json.JSONDecoder(strict=False)
# The first bytes of compressed files.
_GZIP_MAGIC = b"\x1f\x8b"
_BZIP2_MAGIC = b"BZh"
_XZ_MAGIC = b"\xfd7zXZ\x00"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Zstandard's parallel tools begin a file with a frame of their own, which readers skip.
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
# Files of `zstd --long=31` refer back to up to this many bytes.
_ZSTD_WINDOW_BYTES = 1 << 31
# The message of Python's own readers of compressed files.
_CUT_OFF = "Compressed file ended before the end-of-stream marker was reached"
# A file whose first line is not JSON may be one object over several lines. It is read as a whole up
# to this many bytes, so a damaged file of terabytes does not fill the memory.
_MAX_WHOLE_BYTES = 1 << 30
# The first bytes of files of other formats, with advice for each.
_ADVICE_BY_MAGIC = {
    b"version https://git-lfs": "it is a pointer of Git LFS, not the file: get it by git lfs pull",
    codecs.BOM_UTF16_LE: "it is UTF-16: convert it to UTF-8",
    codecs.BOM_UTF16_BE: "it is UTF-16: convert it to UTF-8",
    b"PAR1": "it is a Parquet file: call it .parquet",
}


def read_rows(path: Path) -> Iterator[Row]:
    """Read JSON lines, an array, or one object over several lines, compressed or not.

    Yields the number of the line, from 1, its bytes, and its object or the reason why it has none.
    A string in an array counts as an object with that `text`.

    Raises:
        ValueError: the file has another format, or is an array that is damaged.
        EOFError: the file is compressed and cut off.
    """
    with open_file(path) as file:
        for magic, advice in _ADVICE_BY_MAGIC.items():
            if file.peek(64).startswith(magic):  # type: ignore[attr-defined]
                raise ValueError(advice)
        values, size = _read_whole(file)
    if values is not None:
        for value in values:
            # It is not known at which line a value begins. Each gets its share of the bytes.
            yield 1, size // len(values), _as_row(value)
        return
    # `_read_whole` has consumed the first lines, and rewinding a compressed file is slow.
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield from _rows_of(number, line)


def _read_whole(file: BinaryIO) -> tuple[list[Any] | None, int]:
    """Read the values and the size of a file of one array or object; None if it is JSON lines.

    The first line decides. Either it begins with a bracket, or it is the beginning of a value that
    continues on the next lines.
    """
    # The first line that is not blank.
    line = b""
    while not line.strip():
        line = file.readline()
        if not line:
            return None, 0
        line = line.removeprefix(codecs.BOM_UTF8)
    is_array = line.strip().startswith(b"[")
    is_valid_line = not isinstance(_values(line), str)
    if is_valid_line and not is_array:
        return None, 0
    max_bytes = -1 if is_array else _MAX_WHOLE_BYTES
    content = line + file.read(max_bytes)
    values = _values(content)
    if not isinstance(values, str):
        return values, len(content)
    if is_array:
        raise ValueError(f"its array is damaged or cut off: {_why_invalid(content)}")
    # These are JSON lines, and the first one is damaged.
    return None, 0


def _rows_of(number: int, line: bytes) -> Iterator[Row]:
    """Yield the rows of one line: one object, or several next to each other."""
    values = _values(line)
    if isinstance(values, str):
        yield number, len(line), values
        return
    for value in values:
        yield number, len(line), _as_row(value, is_line=True)


def _values(content: bytes) -> list[Any] | str:
    """Parse the JSON values of a line or file, or return the reason why it has none.

    A single array stands for its items.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    values = []
    position = 0
    end = len(text.rstrip())
    try:
        while position < end:
            # `raw_decode` does not skip the white space before a value. Only a window of the text
            # is searched, because stripping all of the text at every value would take quadratic
            # time. If the whole window is blank, `raw_decode` fails, and the line is rejected.
            window = text[position : position + 1000]
            position += len(window) - len(window.lstrip())
            value, position = _DECODER.raw_decode(text, position)
            values.append(value)
    # Thousands of nested brackets exceed the recursion limit, and are no row either.
    except (ValueError, RecursionError):
        return "not valid JSON"
    if len(values) == 1 and isinstance(values[0], list):
        return values[0]
    return values


def _why_invalid(content: bytes) -> str:
    """Say where the JSON of a damaged array ends."""
    try:
        _DECODER.decode(content.decode().strip())
    except (ValueError, RecursionError) as error:
        return str(error)
    return "there is more after it"


def _as_row(value: object, *, is_line: bool = False) -> dict[str, Any] | str:
    """Return the object of a value, or the reason why it has none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and not is_line:
        return {"text": value}
    return f"not a JSON object but {type(value).__name__}"


# -- Compression -----------------------------------------------------------------------------------


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if its first bytes show a compression.

    The suffix is ignored, because files are renamed more often than compressed again.
    """
    file = path.open("rb")
    magic = file.peek(6)
    if magic.startswith(_GZIP_MAGIC):
        return _buffered(gzip.GzipFile(fileobj=file))
    if magic.startswith(_BZIP2_MAGIC):
        return _buffered(bz2.BZ2File(file))
    if magic.startswith(_XZ_MAGIC):
        return _buffered(lzma.LZMAFile(file))
    if magic.startswith(_ZSTD_MAGIC) or _ZSTD_SKIPPABLE.match(magic):
        return _buffered(_ZstdFile(file), buffer_size=1 << 20)
    return file


def _buffered(stream: Any, buffer_size: int = io.DEFAULT_BUFFER_SIZE) -> BinaryIO:
    """Make a stream that can `peek`, which some decompressing streams cannot."""
    return cast(BinaryIO, io.BufferedReader(stream, buffer_size))


class _ZstdFile(io.RawIOBase):
    """Stream of the content of consecutive Zstandard frames.

    The library's stream ends silently at a truncated frame, as if the file were whole. This one
    raises an EOFError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Bytes of the file after a finished frame, not yet decompressed.
        self._unread = b""
        # The frame that is being read; None between two frames.
        self._frame: zstandard.ZstdDecompressionObj | None = None
        # Content that is decompressed, but not yet returned.
        self._content = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        # A frame may be empty, or need more bytes before it returns any content.
        while not self._content:
            compressed = self._unread or self._file.read(1 << 17)
            self._unread = b""
            if not compressed:
                # The file ends here, which is allowed only between two frames.
                if self._frame is not None:
                    raise EOFError(_CUT_OFF)
                return 0
            if self._frame is None:
                decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
                self._frame = decompressor.decompressobj()
            self._content = self._frame.decompress(compressed)
            if self._frame.eof:
                self._unread = self._frame.unused_data
                self._frame = None
        part = self._content[: len(buffer)]
        self._content = self._content[len(part) :]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()
