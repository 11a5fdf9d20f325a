"""The column of documents: its name, its values, and those that are no document."""

from typing import Any

import pyarrow as pa

TEXT = "text"


def values(column: pa.ChunkedArray | list[Any]) -> list[Any]:
    """Return the values of a column; bytes where text is not valid UTF-8."""
    if isinstance(column, list):
        return column
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_decode(value) for value in column.cast(pa.binary()).to_pylist()]


def _decode(value: bytes | None) -> str | bytes | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def unusable(text: object) -> str | None:
    """Return the reason why a value of the column is no document; None if it is one."""
    if isinstance(text, bytes):
        return "not valid UTF-8"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    return None if text.strip() else "empty"
