"""What a column of documents has, texts or conversations, and what is wrong with some of them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa

from vocagnolm.chat.formats import (
    COLUMNS,
    KNOWN,
    Conversation,
    conversation_columns,
    is_unicode,
    read_row,
)
from vocagnolm.chat.render import Template
from vocagnolm.conventions import TEXT
from vocagnolm.fields import named

# The column of reasons why rows are no documents or conversations.
FAULT = "fault"
# The version of the cache's content. Raise it when files are read differently, so that older caches
# are not used.
FORMAT = 5
# Documents are read from a corpus this many rows at a time, so that few are in memory.
_BATCH_ROWS = 1000
STRING = datasets.Value("string")
_INTEGERS = datasets.List(datasets.Value("int32"))
_CONVERSATION_TYPES = {
    "text": STRING,
    "roles": datasets.List(STRING),
    "ends": _INTEGERS,
    "untrained": _INTEGERS,
    "prompt_messages": datasets.Value("int32"),
    "extras": STRING,
    "fault": STRING,
}
CONVERSATION_FEATURES = datasets.Features(_CONVERSATION_TYPES)
DOCUMENT_FEATURES = datasets.Features({TEXT: STRING, FAULT: STRING})
# Arrow's types of texts, and of bytes that may be texts.
_TEXT_TYPES = ("string", "large_string", "binary", "large_binary", "null")


def joined(corpora: Sequence[datasets.Dataset], source: str = "--dataset") -> datasets.Dataset:
    """Concatenate corpora. If documents and conversations are mixed, only the texts are kept."""
    is_mixed = len({is_conversations(corpus) for corpus in corpora}) > 1
    if is_mixed:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    if len(corpora) == 1:
        return corpora[0]
    return datasets.concatenate_datasets(list(corpora))


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
    # A format, such as that of NumPy, would turn lists of messages into arrays.
    if corpus.format["type"]:
        corpus = corpus.with_format(None)
    corpus = corpus.select_columns(columns_to_read(corpus.column_names, text_column, source))
    if text_column is None and TEXT not in corpus.column_names:
        return _mapped(corpus, _read_conversations, CONVERSATION_FEATURES, "Reading conversations")
    if corpus.column_names != [TEXT]:
        corpus = corpus.rename_column(text_column, TEXT)
    if corpus.features[TEXT] == STRING:
        return corpus
    # Read texts and bytes from Arrow as they are, because bytes need not be valid UTF-8. The
    # library decodes values of other types.
    if str(getattr(corpus.features[TEXT], "dtype", "")).startswith(_TEXT_TYPES):
        corpus = corpus.with_format("arrow")
    corpus = _mapped(corpus, _read_documents, DOCUMENT_FEATURES, "Reading documents")
    return without_faults(corpus)


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
        raise ValueError(_no_column(text_column, source, columns))
    for name in present:
        if present.count(name) > 1:
            raise ValueError(f"{source}: two columns are called {name}: rename one")
    return present


def _no_column(text_column: str | None, source: str, columns: Sequence[str]) -> str:
    """Say that the column of documents is missing, and which columns there are."""
    corpus_name = source.removeprefix("--dataset ")
    column_names = ", ".join(columns) or "none"
    remedy = ""
    if not text_column:
        remedy = f"; columns that are understood: {KNOWN}; or give {named('text_column')}"
    return (
        f"{named('text_column')} {text_column or TEXT!r} is not a column of {corpus_name}; its "
        f"columns are {column_names}{remedy}"
    )


def without_faults(corpus: datasets.Dataset) -> datasets.Dataset:
    """Drop the column of faults if no document has one."""
    # Conversations always have it.
    if is_conversations(corpus):
        return corpus
    has_faults = corpus.data.column(FAULT).null_count < len(corpus)
    if has_faults:
        return corpus
    return corpus.select_columns([TEXT])


# -- Columns ---------------------------------------------------------------------------------------


def _mapped(
    corpus: datasets.Dataset, read: Any, features: datasets.Features, description: str
) -> datasets.Dataset:
    """Replace all columns by those that `read` makes of a batch of rows."""
    # The library would hash the code of `read`, and map the corpus again for every version of it.
    # Here `FORMAT` says when the result changes.
    key = f"{corpus._fingerprint}|{corpus.column_names}|{list(features)}|{FORMAT}"
    return corpus.map(
        read,
        batched=True,
        batch_size=200,
        remove_columns=corpus.column_names,
        features=features,
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
        desc=description,
    ).with_format(None)


def _read_documents(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the texts of a batch, and the reasons why values are none, as two columns."""
    texts = []
    faults = []
    for value in column_values(batch[TEXT]):
        text, fault = document_of(value)
        texts.append(text)
        faults.append(fault)
    return {TEXT: texts, FAULT: faults}


def _read_conversations(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of the conversations in a batch of rows."""
    names = list(batch)
    rows = []
    # The batch is a mapping of columns, but `read_row` takes one row.
    for values in zip(*batch.values(), strict=True):
        fields = dict(zip(names, values, strict=True))
        rows.append(read_row(fields))
    columns = {}
    for name in COLUMNS:
        columns[name] = [row[name] for row in rows]
    return columns


def document_of(value: object) -> tuple[str | None, str | None]:
    """Return the text of a document and None, or None and why the value is no text.

    A null has no reason of its own, because `unusable` names it.

    >>> document_of(b"text"), document_of(5)
    (('text', None), (None, 'not text but int'))
    """
    if isinstance(value, bytes):
        try:
            return value.decode(), None
        except UnicodeDecodeError:
            return None, "not valid UTF-8"
    if value is None:
        return None, None
    if not isinstance(value, str):
        return None, f"not text but {type(value).__name__}"
    if not is_unicode(value):
        return None, "a lone surrogate in it, which is not valid Unicode"
    return value, None


def column_values(column: pa.ChunkedArray | list[Any]) -> list[Any]:
    """Return the values of a column, with bytes in place of invalid UTF-8."""
    if isinstance(column, list):
        return column
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        # Arrow does not check the strings of a file, so one of them may break a whole column.
        # Decode them one by one.
        values = column.cast(pa.binary()).to_pylist()
        return [_decode(value) for value in values]


def _decode(value: bytes | None) -> str | bytes | None:
    """Decode UTF-8. Null, and bytes that are something else, stay as they are."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def unusable(text: object) -> str | None:
    """Return why a value of the column is no document, or None."""
    if isinstance(text, bytes):
        return "not valid UTF-8"
    if text is None:
        return "null"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    if not text.strip():
        return "empty"
    return None


def reasons_in(corpus: datasets.Dataset) -> Iterator[str]:
    """Read why rows are no documents or conversations, before any tokenizer reads them."""
    columns = [TEXT]
    if FAULT in corpus.column_names:
        columns.append(FAULT)
    rows = corpus.select_columns(columns).with_format("arrow")
    for start in range(0, len(rows), _BATCH_ROWS):
        batch = rows[start : start + _BATCH_ROWS]
        # The last batch may be shorter.
        indices = range(start, start + batch.num_rows)
        faults = faults_of(batch, indices)
        for index, text in zip(indices, column_values(batch[TEXT]), strict=True):
            # The text of a row with a fault is null, which is not the reason to report.
            reason = faults.get(index) or unusable(text)
            if reason:
                yield reason


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus has conversations instead of documents."""
    return "roles" in corpus.column_names


def conversations_of(
    batch: Mapping[str, Any], documents: Sequence[int]
) -> tuple[dict[int, Conversation], dict[int, str]]:
    """Return the conversations of a batch, and the faults of its other rows, both by index.

    `documents` are the indices of the batch's rows in the corpus.
    """
    conversations: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    columns = [column_values(batch[name]) for name in COLUMNS]
    rows = zip(*columns, strict=True)
    for index, row in zip(documents, rows, strict=True):
        text, roles, ends, untrained, prompt_messages, extras, fault = row
        if fault is not None:
            faults[index] = fault
        else:
            conversations[index] = Conversation(
                text, tuple(roles), tuple(ends), tuple(untrained), prompt_messages, extras
            )
    return conversations, faults


def faults_of(batch: Mapping[str, Any], documents: Sequence[int]) -> dict[int, str]:
    """Return the reasons why rows of a batch are no documents, by index.

    `documents` are the indices of the batch's rows in the corpus.
    """
    # A batch is a dict of columns, or an Arrow table, which has its names in an attribute.
    names = getattr(batch, "column_names", batch)
    if FAULT not in names:
        return {}
    faults = {}
    for index, fault in zip(documents, column_values(batch[FAULT]), strict=True):
        if fault is not None:
            faults[index] = fault
    return faults


def read_texts(
    corpus: datasets.Dataset, indices: range, template: Template | None = None
) -> Iterator[tuple[int, str]]:
    """Read usable documents with their indices. The template renders conversations."""
    for start in range(0, len(indices), _BATCH_ROWS):
        # Part of a range is a range, and its bounds are indices of rows.
        batch_indices = indices[start : start + _BATCH_ROWS]
        batch = corpus.with_format("arrow")[batch_indices.start : batch_indices.stop]
        if template is None:
            for index, text in zip(batch_indices, column_values(batch[TEXT]), strict=True):
                if not unusable(text):
                    yield index, text
        else:
            conversations, _ = conversations_of(batch, batch_indices)
            for index, conversation in conversations.items():
                # If it cannot render, a template returns a reason instead of a text.
                rendered = template.render(conversation)
                if not isinstance(rendered, str):
                    yield index, rendered.text
