"""What a row of a corpus is: a document, a conversation, or a reason why it is skipped."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa

from vocagnolm.chat.formats import (
    KNOWN,
    SKIPPED,
    Conversation,
    conversation_columns,
    is_unicode,
    no_conversation,
    read_row,
)
from vocagnolm.chat.render import Template
from vocagnolm.conventions import TEXT
from vocagnolm.fields import OptionError

# The version of the cache's content. Raise it when files are read differently, so that older caches
# are not used.
FORMAT = 6
# Documents are read from a corpus this many rows at a time, so that few are in memory.
_BATCH_ROWS = 1000
_STRING = datasets.Value("string")
_INTEGERS = datasets.List(datasets.Value("int32"))
_DOCUMENT_FEATURES = datasets.Features({TEXT: _STRING, SKIPPED: _STRING})
_CONVERSATION_FEATURES = datasets.Features(
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


def features_of(turns: bool) -> datasets.Features:
    """Return the columns of conversations (`turns`) or documents."""
    return _CONVERSATION_FEATURES if turns else _DOCUMENT_FEATURES


def as_record(fields: Mapping[str, Any], turns: bool) -> dict[str, Any]:
    """Make the record of a row from the columns that are read, as a conversation or document."""
    if turns:
        return read_row(fields)
    (value,) = fields.values()
    text, reason = document_of(value)
    return {TEXT: text, SKIPPED: reason}


def skipped_record(reason: str, turns: bool) -> dict[str, Any]:
    """Make the record of a row that cannot be read."""
    return no_conversation(reason) if turns else {TEXT: None, SKIPPED: reason}


def document_of(value: object) -> tuple[str | None, str | None]:
    """Return the text of a document and None, or None and why the value is skipped.

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
    if not is_unicode(value):
        return None, "a lone surrogate in it, which is not valid Unicode"
    if not value.strip():
        return None, "empty"
    return value, None


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus has conversations instead of documents."""
    return "roles" in corpus.column_names


def joined(corpora: Sequence[datasets.Dataset], option: str) -> datasets.Dataset:
    """Concatenate corpora, which must all be documents or all be conversations."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        raise OptionError(option, "holds conversations and documents: read them separately")
    return datasets.concatenate_datasets(list(corpora))


# -- Columns ---------------------------------------------------------------------------------------


def columns_to_read(columns: Sequence[str], text_column: str | None, source: str) -> list[str]:
    """Return which of the dataset's columns make documents or conversations.

    Raises:
        ValueError: there are none, or two have the same name.
    """
    column_names: tuple[str, ...] = ()
    if not text_column:
        column_names = conversation_columns(columns)
    if not column_names:
        column_names = (text_column or TEXT,)
    # Keep the dataset's order.
    present = [name for name in columns if name in column_names]
    if not present:
        remedy = "" if text_column else f"; columns that are understood: {KNOWN}"
        raise OptionError(
            "text_column",
            f"{text_column or TEXT!r} is not a column of {source}; its columns are "
            f"{', '.join(columns) or 'none'}{remedy}",
        )
    for name in present:
        if present.count(name) > 1:
            raise ValueError(f"{source}: two columns are called {name}: rename one")
    return present


def are_conversations(names: Sequence[str], text_column: str | None) -> bool:
    """Test whether the columns of `columns_to_read` make conversations."""
    return not text_column and TEXT not in names


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
    names = columns_to_read(corpus.column_names, text_column, source)
    # A format, such as that of NumPy, would turn lists of messages into arrays.
    corpus = corpus.select_columns(names).with_format(None)
    turns = are_conversations(names, text_column)
    # A column of text is read as it is, without another copy on the disk.
    if not turns and corpus.features[names[0]] == _STRING:
        return corpus if names == [TEXT] else corpus.rename_column(names[0], TEXT)
    # The library would hash the code of the function, and map the corpus again for every version of
    # it. Here `FORMAT` says when the result changes.
    key = f"{corpus._fingerprint}|{names}|{turns}|{FORMAT}"
    return corpus.map(
        _read_batch,
        batched=True,
        batch_size=200,
        remove_columns=names,
        features=features_of(turns),
        fn_kwargs={"turns": turns},
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
        desc="Reading conversations" if turns else "Reading documents",
    )


def _read_batch(batch: Mapping[str, Sequence[Any]], turns: bool) -> dict[str, list[Any]]:
    """Make the records of a batch of rows, as columns."""
    columns: dict[str, list[Any]] = {name: [] for name in features_of(turns)}
    # The batch is a mapping of columns, but a record is made of one row.
    for values in zip(*batch.values(), strict=True):
        record = as_record(dict(zip(batch, values, strict=True)), turns)
        for name, column in columns.items():
            column.append(record[name])
    return columns


# -- Reading a corpus ------------------------------------------------------------------------------


def usable_in(batch: pa.Table, indices: Sequence[int]) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the documents or conversations of a batch, and why its other rows are skipped.

    Both are by index. `indices` are those of the batch's rows in the corpus.
    """
    usable: dict[int, Any] = {}
    skipped: dict[int, str] = {}
    turns = "roles" in batch.column_names
    names = [name for name in features_of(turns) if name in batch.column_names]
    columns = [_values(batch[name]) for name in names]
    for index, values in zip(indices, zip(*columns, strict=True), strict=True):
        record = dict(zip(names, values, strict=True))
        content: Any = None
        reason = record.get(SKIPPED)
        if reason is None and turns:
            content = Conversation(
                record[TEXT],
                tuple(record["roles"]),
                tuple(record["ends"]),
                tuple(record["untrained"]),
                record["prompt_messages"],
                record["extras"],
            )
        elif reason is None:
            # A column of text may come from a file that nobody has read row by row.
            content, reason = document_of(record[TEXT])
        if reason is None:
            usable[index] = content
        else:
            skipped[index] = reason
    return usable, skipped


def _values(column: pa.ChunkedArray) -> list[Any]:
    """Return the values of a column, with bytes in place of invalid UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        # Arrow does not check the strings of a file, so one of them may break a whole column.
        return list(column.cast(pa.binary()).to_pylist())


def _batches(
    corpus: datasets.Dataset, indices: range
) -> Iterator[tuple[dict[int, Any], dict[int, str]]]:
    """Read rows of a corpus with `usable_in`, a few at a time."""
    rows = corpus.with_format("arrow")
    for start in range(0, len(indices), _BATCH_ROWS):
        # Part of a range is a range, and its bounds are indices of rows.
        part = indices[start : start + _BATCH_ROWS]
        yield usable_in(rows[part.start : part.stop], part)


def reasons_in(corpus: datasets.Dataset) -> Iterator[str]:
    """Read why rows are skipped, before any tokenizer reads them."""
    for _, skipped in _batches(corpus, range(len(corpus))):
        yield from skipped.values()


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
