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
FORMAT = 1
STRING, _PLACES = datasets.Value("string"), datasets.List(datasets.Value("int32"))
_KINDS = (STRING, datasets.List(STRING), _PLACES, _PLACES, STRING, STRING)
CONVERSATION_FEATURES = datasets.Features(dict(zip(COLUMNS, _KINDS, strict=True)))
DOCUMENT_FEATURES = datasets.Features({TEXT: STRING, FAULT: STRING})
# Arrow's types of texts, and of bytes that may be texts.
_TEXT_TYPES = ("string", "large_string", "binary", "large_binary", "null")


def joined(corpora: Sequence[datasets.Dataset], shown: str = "--dataset") -> datasets.Dataset:
    """Concatenate corpora; of a mix with conversations, the texts."""
    if len({is_conversations(corpus) for corpus in corpora}) > 1:
        corpora = [corpus.select_columns([TEXT]) for corpus in corpora]
    return corpora[0] if len(corpora) == 1 else datasets.concatenate_datasets(list(corpora))


def only_text(corpus: datasets.Dataset, text_column: str | None, shown: str) -> datasets.Dataset:
    """Keep the column of documents as text, or read conversations, if no column is given.

    A ValueError that names the dataset as `shown` where there is neither.
    """
    corpus = corpus.select_columns(columns_to_read(corpus.column_names, text_column, shown))
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


def columns_to_read(columns: Sequence[str], text_column: str | None, shown: str) -> list[str]:
    """Return the columns that are there, of those that documents or conversations are made of."""
    wanted = () if text_column else conversation_columns(columns)
    wanted = wanted or (text_column or TEXT,)
    there = [name for name in columns if name in wanted]
    if not there:
        raise ValueError(_no_column(text_column, shown, columns))
    if len({*there}) < len(there):
        twice = next(name for name in there if there.count(name) > 1)
        raise ValueError(f"{shown}: two columns are called {twice}: rename one")
    return there


def _no_column(text_column: str | None, shown: str, columns: Sequence[str]) -> str:
    named = shown.removeprefix("--dataset ")
    found = ", ".join(columns) or "none"
    way = "" if text_column else f"; columns that are understood: {KNOWN}; or give --text_column"
    shown_column = repr(text_column or TEXT)
    return f"--text_column {shown_column} is not a column of {named}; its columns are {found}{way}"


def without_faults(corpus: datasets.Dataset) -> datasets.Dataset:
    """Leave out the faults of documents where there are none."""
    if is_conversations(corpus) or corpus.data.column(FAULT).null_count < len(corpus):
        return corpus
    return corpus.select_columns([TEXT])


# -- Columns ---------------------------------------------------------------------------------------


def _mapped(
    corpus: datasets.Dataset, read: Any, features: datasets.Features, shown: str
) -> datasets.Dataset:
    """Replace all columns."""
    named = f"{corpus._fingerprint}|{corpus.column_names}|{[*features]}|{FORMAT}"
    return corpus.map(
        read,
        batched=True,
        batch_size=200,
        remove_columns=corpus.column_names,
        features=features,
        new_fingerprint=hashlib.sha256(named.encode()).hexdigest()[:32],
        desc=shown,
    ).with_format(None)


def _read_documents(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    read = [document_of(value) for value in column_values(batch[TEXT])]
    return {TEXT: [text for text, _ in read], FAULT: [fault for _, fault in read]}


def _read_conversations(batch: Mapping[str, Any]) -> dict[str, list[Any]]:
    names = [*batch]
    read = [
        read_row(dict(zip(names, values, strict=True)))
        for values in zip(*batch.values(), strict=True)
    ]
    return {name: [row[name] for row in read] for name in COLUMNS}


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
    found: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    columns = (column_values(batch[name]) for name in COLUMNS)
    for index, text, roles, ends, untrained, given, fault in zip(documents, *columns, strict=True):
        if fault is not None:
            faults[index] = fault
        else:
            found[index] = Conversation(text, tuple(roles), tuple(ends), tuple(untrained), given)
    return found, faults


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
            for index, one in conversations.items():
                rendered = template.render(one)
                if not isinstance(rendered, str):
                    yield index, rendered.text
