"""Reads the rows of a file of comma- or tab-separated values, whatever is wrong with some of them.

The input is a path. The output is a dict for each row, or the reason why a record is no row. This
module does not know which column is read.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vocagnolm.jsonl import Row, open_file

# The most characters of a field of a CSV file. Python's own limit is shorter than many documents.
_MAX_FIELD = 1 << 30
# What Python's reader says of a quoted field that the file does not end.
_NO_END = "unexpected end of data"


def csv_records(file: Path, separator: str) -> Iterator[tuple[int, list[str] | str]]:
    """Yield the number of each record's first line, and its fields or why it has none.

    Every field is a text, because a number would lose the zeros of 007, and a null the text NA.
    """
    csv.field_size_limit(_MAX_FIELD)
    with open_file(file) as content:
        lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
        # Without `strict`, text after a closing quote would lose its quotes.
        records = csv.reader(lines, delimiter=separator, strict=True)
        fields: list[str] | str | None = []
        while fields is not None:
            line_number = records.line_num + 1
            try:
                fields = next(records, None)
            except csv.Error as error:
                # This field has swallowed all rows after it, and nobody knows how many. The new
                # error gets no cause, because callers report the cause of an error if it has one.
                if _NO_END in str(error):
                    raise ValueError(f"line {line_number}: a quoted field has no end") from None
                fields = f"not valid CSV: {error}"
            # A blank line has no fields.
            if fields:
                yield line_number, fields


def csv_rows(
    records: Iterable[tuple[int, list[str] | str]], columns: Sequence[str], separator: str
) -> Iterator[Row]:
    """Make rows of the records of a table, or say why a record is no row."""
    separator_name = "tabs" if separator == "\t" else "commas"
    for line_number, fields in records:
        if isinstance(fields, str):
            yield line_number, len(fields), fields
            continue
        size = sum(map(len, fields))
        # With more or fewer fields than the header, nobody knows which of them is the text, or
        # where it ends.
        if len(fields) > len(columns):
            reason = f"more fields than the header (quote texts with {separator_name})"
            yield line_number, size, reason
        elif len(fields) < len(columns):
            yield line_number, size, "fewer fields than the header (quote texts with line breaks)"
        else:
            yield line_number, size, dict(zip(columns, fields, strict=True))
