"""What a column of documents holds, texts or conversations, and what is wrong with some."""

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

FAULT = "fault"
# Raise it when a file is read in another way: what is cached of it is read again.
FORMAT = 2
STRING = datasets.Value("string")
_PLACES = datasets.List(datasets.Value("int32"))
_KINDS = (STRING, datasets.List(STRING), _PLACES, _PLACES, STRING, STRING)
CONVERSATION_FEATURES = datasets.Features(dict(zip(COLUMNS, _KINDS, strict=True)))
DOCUMENT_FEATURES = datasets.Features({TEXT: STRING, FAULT: STRING})
# Arrow's types of texts, and of bytes that may be texts.
_TEXT_TYPES = ("string", "large_string", "binary", "large_binary", "null")


def joined(corpora: Sequence[datasets.Dataset], source: str = "--dataset") -> datasets.Dataset:
    """Concatenate corpora; of a mix with conversations, the texts."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    return corpora[0] if len(corpora) == 1 else datasets.concatenate_datasets(list(corpora))


def only_text(corpus: datasets.Dataset, text_column: str | None, source: str) -> datasets.Dataset:
    """Keep the column of documents as text, or read conversations, if no column is given.

    A ValueError that names the dataset as `source` where there is neither.
    """
    corpus = corpus.select_columns(columns_to_read(corpus.column_names, text_column, source))
    if text_column is None and TEXT not in corpus.column_names:
        return _mapped(corpus, _read_conversations, CONVERSATION_FEATURES, "Reading conversations")
    if corpus.column_names != [TEXT]:
        corpus = corpus.rename_column(text_column, TEXT)
    if corpus.features[TEXT] == STRING:
        return corpus
    # The library decodes other values, such as those of several types.
    if str(getattr(corpus.features[TEXT], "dtype", "")).startswith(_TEXT_TYPES):
        corpus = corpus.with_format("arrow")
    corpus = _mapped(corpus, _read_documents, DOCUMENT_FEATURES, "Reading documents")
    return without_faults(corpus)


def columns_to_read(columns: Sequence[str], text_column: str | None, source: str) -> list[str]:
    """Return the columns that are there, of those that documents or conversations are made of."""
    document_columns = () if text_column else conversation_columns(columns)
    document_columns = document_columns or (text_column or TEXT,)
    present = [name for name in columns if name in document_columns]
    if not present:
        raise ValueError(_no_column(text_column, source, columns))
    for name in present:
        if present.count(name) > 1:
            raise ValueError(f"{source}: two columns are called {name}: rename one")
    return present


def _no_column(text_column: str | None, source: str, columns: Sequence[str]) -> str:
    corpus_name = source.removeprefix("--dataset ")
    column_names = ", ".join(columns) or "none"
    remedy = ""
    if not text_column:
        remedy = f"; columns that are understood: {KNOWN}; or give --text_column"
    return (
        f"--text_column {text_column or TEXT!r} is not a column of {corpus_name}; its columns are "
        f"{column_names}{remedy}"
    )


def without_faults(corpus: datasets.Dataset) -> datasets.Dataset:
    """Leave out the faults of documents where there are none."""
    if is_conversations(corpus) or corpus.data.column(FAULT).null_count < len(corpus):
        return corpus
    return corpus.select_columns([TEXT])


# -- Columns ---------------------------------------------------------------------------------------


def _mapped(
    corpus: datasets.Dataset, read: Any, features: datasets.Features, source: str
) -> datasets.Dataset:
    """Replace all columns."""
    key = f"{corpus._fingerprint}|{corpus.column_names}|{list(features)}|{FORMAT}"
    return corpus.map(
        read,
        batched=True,
        batch_size=200,
        remove_columns=corpus.column_names,
        features=features,
        new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:32],
        desc=source,
    ).with_format(None)


def _read_documents(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    texts = []
    faults = []
    for value in column_values(batch[TEXT]):
        text, fault = document_of(value)
        texts.append(text)
        faults.append(fault)
    return {TEXT: texts, FAULT: faults}


def _read_conversations(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = list(batch)
    rows = []
    for values in zip(*batch.values(), strict=True):
        rows.append(read_row(dict(zip(names, values, strict=True))))
    return {name: [row[name] for row in rows] for name in COLUMNS}


def document_of(value: object) -> tuple[str | None, str | None]:
    """Return the text that a value of the column is, or the reason why it is none.

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
    if text is None:
        return "null"
    if not isinstance(text, str):
        return f"not text but {type(text).__name__}"
    return None if text.strip() else "empty"


def reasons_in(corpus: datasets.Dataset) -> Iterator[str]:
    """Read why rows are no documents or conversations, before any tokenizer reads them."""
    columns = [name for name in (TEXT, FAULT) if name in corpus.column_names]
    rows = corpus.select_columns(columns).with_format("arrow")
    for at in range(0, len(rows), 1000):
        batch = rows[at : at + 1000]
        faults = faults_of(batch, range(at, at + batch.num_rows))
        for index, text in enumerate(column_values(batch[TEXT]), at):
            if reason := faults.get(index) or unusable(text):
                yield reason


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus holds conversations, not documents."""
    return "roles" in corpus.column_names


def conversations_of(
    batch: Mapping[str, Any], documents: Sequence[int]
) -> tuple[dict[int, Conversation], dict[int, str]]:
    """Return the conversations of a batch by index, and the reasons why others are none."""
    conversations: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    columns = [column_values(batch[name]) for name in COLUMNS]
    for index, values in zip(documents, zip(*columns, strict=True), strict=True):
        text, roles, ends, untrained, extras, fault = values
        if fault is not None:
            faults[index] = fault
        else:
            conversations[index] = Conversation(
                text, tuple(roles), tuple(ends), tuple(untrained), extras
            )
    return conversations, faults


def faults_of(batch: Mapping[str, Any], documents: Sequence[int]) -> dict[int, str]:
    """Return the reasons why rows of a batch of documents are none, by index."""
    names = getattr(batch, "column_names", batch)
    if FAULT not in names:
        return {}
    faults = zip(documents, column_values(batch[FAULT]), strict=True)
    return {index: fault for index, fault in faults if fault is not None}


def read_texts(
    corpus: datasets.Dataset, indices: range, template: Template | None = None
) -> Iterator[tuple[int, str]]:
    """Read usable documents with their indices; conversations are rendered by the template."""
    for at in range(0, len(indices), 1000):
        part = indices[at : at + 1000]
        columns = corpus.with_format("arrow")[part.start : part.stop]
        if template is None:
            for index, text in zip(part, column_values(columns[TEXT]), strict=True):
                if not unusable(text):
                    yield index, text
        else:
            conversations, _ = conversations_of(columns, part)
            for index, conversation in conversations.items():
                rendered = template.render(conversation)
                if not isinstance(rendered, str):
                    yield index, rendered.text
