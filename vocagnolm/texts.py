"""The rows of a corpus: documents, conversations, or reasons why they are skipped.

A file of JSON, comma-separated values or text is read row by row, whatever is wrong with some of
them. A row becomes a record, in the columns of `FEATURES`, and what records hold is read back here.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import pyarrow as pa

from vocagnolm.chat.formats import (
    FORMATS,
    SKIPPED,
    SURROGATE,
    WEIGHT,
    Conversation,
    has_weights,
    read_row,
    read_weight,
)
from vocagnolm.chat.render import Template
from vocagnolm.conventions import TEXT
from vocagnolm.fields import OptionError

# The version of the cache's content. Raise it when files are read differently, so that older caches
# are not used.
FORMAT = 7
# Rows that are in memory at once while a file is read. A document may have megabytes.
BATCH_ROWS = 200
# Documents are read from a corpus this many rows at a time, so that few are in memory.
_READ_ROWS = 1000
_STRING = datasets.Value("string")
_INTEGERS = datasets.List(datasets.Value("int32"))
_DOCUMENT = datasets.Features({TEXT: _STRING, SKIPPED: _STRING})
_CONVERSATION = datasets.Features(
    {
        TEXT: _STRING,
        "roles": datasets.List(_STRING),
        "ends": _INTEGERS,
        "untrained": _INTEGERS,
        "prompt_messages": datasets.Value("int32"),
        "extras": _STRING,
        SKIPPED: _STRING,
    }
)
_NUMBER = datasets.Value("float64")
# A conversation has the weight of its row, and one for each message.
WEIGHTS = "weights"
# The columns of documents (False) and of conversations (True), without weights and with them.
FEATURES = {
    (False, False): _DOCUMENT,
    (False, True): datasets.Features(_DOCUMENT | {WEIGHT: _NUMBER}),
    (True, False): _CONVERSATION,
    (True, True): datasets.Features(_CONVERSATION | {WEIGHTS: datasets.List(_NUMBER)}),
}
# The columns of a file are those of its first rows. A column that begins later is not seen.
FIRST_ROWS = 1000
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
# The most characters of a field of a CSV file. Python's own limit is shorter than many documents.
_MAX_FIELD = 1 << 30
_NO_OBJECT = "not a JSON object"
_LATE_WEIGHTS = 'has the first weight of its file: give the first row a column "weight", 1'


# -- Rows of a file --------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """Name what a file holds by its suffix, or return "" if it is not read."""
    if path.suffix.lower() in _OPENERS:
        path = path.with_suffix("")
    return KINDS.get(path.suffix.lower(), "")


def read_rows(path: Path) -> Iterator[dict[str, Any] | str]:
    """Yield the fields of each row of a file that is not a table of Arrow, or why it is skipped.

    Raises:
        ValueError: the file is damaged as a whole.
        EOFError: the file is compressed and cut off. For Zstandard, it is an OSError.
    """
    kind = kind_of(path)
    with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
        if kind == "text":
            # Line feeds become its line ends.
            yield {TEXT: file.read().replace(b"\r\n", b"\n").replace(b"\r", b"\n")}
            return
        separator = "\t" if ".tsv" in path.name.lower() else ","
        rows = _json_rows(file) if kind == "json" else _csv_rows(file, separator)
        for line, row in rows:
            yield f"{path.name}:{line}: {row}" if isinstance(row, str) else row


def _json_rows(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Read JSON lines, or one array of objects, with the numbers of their lines."""
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.lstrip().startswith(b"["):
                for item in json.loads(line + file.read(), strict=False):
                    yield 1, item if isinstance(item, dict) else _NO_OBJECT
                return
        if line.strip():
            yield number, _parse(line)


def _parse(line: bytes) -> dict[str, Any] | str:
    """Parse a line of JSON, or return why it is skipped."""
    try:
        # Control characters in strings are accepted, as in Arrow's reader.
        value = json.loads(line.decode(), strict=False)
    except UnicodeDecodeError:
        return "not valid UTF-8"
    # Thousands of nested brackets exceed the recursion limit.
    except (ValueError, RecursionError):
        return "not valid JSON"
    return value if isinstance(value, dict) else _NO_OBJECT


def _csv_rows(file: BinaryIO, separator: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
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
            # With more or fewer fields than the header, the text may begin and end
            # anywhere. A blank line has no fields.
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


# What opens a compressed file.
_OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
    ".zstd": _open_zstandard,
}


# -- Records ---------------------------------------------------------------------------------------


def columns_to_read(
    columns: Sequence[str], text_column: str | None, source: str, weighted: bool = False
) -> tuple[list[str], bool]:
    """Return which of the dataset's columns are read, and whether they make conversations.

    In addition, `weight` is the last if there is one, or if messages are `weighted`.

    Raises:
        OptionError: no column can be read.
    """
    formats = (((text_column,), ()),) if text_column else FORMATS
    for required, optional in formats:
        # A table of Arrow may have several columns of one name.
        if all(columns.count(name) == 1 for name in required):
            # Keep the dataset's order.
            names = [name for name in columns if name in required + optional and name != WEIGHT]
            turns = required[0] not in (TEXT, text_column)
            if WEIGHT in columns or (turns and weighted):
                names.append(WEIGHT)
            return names, turns
    understood = [" and ".join(required) for required, _ in formats]
    raise OptionError(
        "text_column",
        f"{text_column or TEXT!r} is not one column of {source}, which has "
        f"{', '.join(columns) or 'none'}: expected {', or '.join(understood)}",
    )


def as_record(
    row: Mapping[str, Any] | str, names: Sequence[str], turns: bool, version: int = FORMAT
) -> dict[str, Any]:
    """Make a conversation (`turns`) or a document of these columns of a row.

    A row that is a text is the reason why it is skipped. Caches are told apart by the arguments, of
    which `version` is one for that alone.
    """
    record: dict[str, Any] = dict.fromkeys(FEATURES[turns, WEIGHT in names])
    if isinstance(row, str):
        record[SKIPPED] = row
        return record
    if WEIGHT not in names and row.get(WEIGHT) not in (None, 1):
        record[SKIPPED] = _LATE_WEIGHTS
        return record
    fields = {name: row.get(name) for name in names}
    if not turns:
        record[TEXT], record[SKIPPED] = document_of(fields[names[0]], fields.get(WEIGHT))
        if WEIGHT in names and record[SKIPPED] is None:
            record[WEIGHT] = read_weight(fields[WEIGHT])
        return record
    conversation = read_row(fields)
    if isinstance(conversation, str):
        record[SKIPPED] = conversation
    elif WEIGHT not in names and not {0, 1}.issuperset(conversation.weights):
        record[SKIPPED] = _LATE_WEIGHTS
    else:
        # Without a column of weights, only those of untrained answers are kept.
        for name in record.keys() - {SKIPPED}:
            record[name] = vars(conversation)[name]
    return record


def document_of(value: object, weight: object = None) -> tuple[str | None, str | None]:
    """Return the text of a document and None, or None and why the row is skipped.

    >>> document_of(b"text"), document_of(5), document_of(" ")
    (('text', None), (None, 'not text but int'), (None, 'empty'))
    """
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return None, "not valid UTF-8"
    if value is None:
        return None, "null"
    if not isinstance(value, str):
        return None, f"not text but {type(value).__name__}"
    if SURROGATE.search(value):
        return None, "a lone surrogate in it, which is not valid Unicode"
    if not value.strip():
        return None, "empty"
    weight = read_weight(weight)
    return (None, weight) if isinstance(weight, str) else (value, None)


def only_text(corpus: datasets.Dataset, text_column: str | None, source: str) -> datasets.Dataset:
    """Keep the column of documents as text, or read conversations if no column is named.

    Raises:
        ValueError: the dataset, which the message calls `source`, has neither.
    """
    if corpus.format["type"] == "custom":
        raise ValueError(
            f"{source} has a transform (set_transform), which would not be applied: apply it with "
            "map"
        )
    names, turns = columns_to_read(corpus.column_names, text_column, source)
    # A format, such as that of NumPy, would turn lists of messages into arrays.
    corpus = corpus.select_columns(names).with_format(None)
    # A column of text is read as it is, without another copy on the disk.
    is_number = corpus.features.get(WEIGHT, _NUMBER) == _NUMBER
    if not turns and corpus.features[names[0]] == _STRING and is_number:
        return corpus if names[0] == TEXT else corpus.rename_column(names[0], TEXT)
    first_rows = corpus.select(range(min(len(corpus), FIRST_ROWS)))
    columns = corpus.column_names
    names, _ = columns_to_read(columns, text_column, source, any(map(has_weights, first_rows)))
    return corpus.map(
        as_record,
        remove_columns=columns,
        features=FEATURES[turns, WEIGHT in names],
        # The library's cache is used until one of these changes, and also if the code changes.
        fn_kwargs={"names": names, "turns": turns, "version": FORMAT},
        writer_batch_size=BATCH_ROWS,
        desc="Reading conversations" if turns else "Reading documents",
    )


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus has conversations instead of documents."""
    return "roles" in corpus.column_names


def joined(corpora: Sequence[datasets.Dataset], option: str) -> datasets.Dataset:
    """Concatenate corpora, which must all be documents or all be conversations."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        raise OptionError(option, "holds conversations and documents: read them separately")
    return datasets.concatenate_datasets(list(corpora))


# -- Reading a corpus ------------------------------------------------------------------------------


def usable_in(batch: pa.Table, indices: Sequence[int]) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the documents or conversations of a batch, and why its other rows are skipped.

    Both are by index. `indices` are those of the batch's rows in the corpus.
    """
    usable: dict[int, Any] = {}
    skipped: dict[int, str] = {}
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:
        # Arrow does not check the strings of a file, so one document may break a whole column.
        column = batch.column_names.index(TEXT)
        records = batch.set_column(column, TEXT, batch[TEXT].cast(pa.binary())).to_pylist()
    for index, record in zip(indices, records, strict=True):
        content: Any = None
        reason = record.pop(SKIPPED, None)
        if reason is None and "roles" in record:
            content = Conversation(**record)
        elif reason is None:
            # A column of text may come from a file that was not read row by row.
            content, reason = document_of(record[TEXT], record.get(WEIGHT))
        if reason is None:
            usable[index] = content
        else:
            skipped[index] = reason
    return usable, skipped


def _batches(
    corpus: datasets.Dataset, indices: range
) -> Iterator[tuple[dict[int, Any], dict[int, str]]]:
    """Read rows of a corpus with `usable_in`, a few at a time."""
    rows = corpus.with_format("arrow")
    for start in range(0, len(indices), _READ_ROWS):
        # Part of a range is a range, and its bounds are indices of rows.
        part = indices[start : start + _READ_ROWS]
        yield usable_in(rows[part.start : part.stop], part)


def reasons_in(corpus: datasets.Dataset, template: Template | None = None) -> Iterator[str]:
    """Read why rows are skipped: they are unusable, or the template cannot render them."""
    for usable, skipped in _batches(corpus, range(len(corpus))):
        yield from skipped.values()
        if template is None:
            continue
        for conversation in usable.values():
            rendered = template.render(conversation)
            if isinstance(rendered, str):
                yield rendered


def read_texts(
    corpus: datasets.Dataset, indices: range, template: Template | None = None
) -> Iterator[tuple[int, str]]:
    """Read usable documents with their indices. The template renders conversations."""
    for usable, _ in _batches(corpus, indices):
        for index, content in usable.items():
            if template is None:
                yield index, content
                continue
            # If it cannot render, a template returns a reason instead of a text.
            rendered = template.render(content)
            if not isinstance(rendered, str):
                yield index, rendered.text
