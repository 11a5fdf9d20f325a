"""The columns of a data set of conversations: made of its messages, and read back."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets

from vocagnolm.chat.formats import COLUMNS, ROLES, Conversation, Format, read_rows
from vocagnolm.texts.column import values


def as_conversations(corpus: datasets.Dataset, format: Format) -> datasets.Dataset:
    """Replace all columns by those of `formats.read_rows`."""
    texts, places = datasets.Value("string"), datasets.List(datasets.Value("int32"))
    kinds = (texts, datasets.List(texts), places, places, texts, texts)
    columns = dict(zip(COLUMNS, kinds, strict=True))
    named = f"{corpus._fingerprint}|{format}|{[*columns]}"
    return corpus.map(
        partial(_read_batch, format=format),
        batched=True,
        remove_columns=corpus.column_names,
        features=datasets.Features(columns),
        new_fingerprint=hashlib.sha256(named.encode()).hexdigest()[:32],
        desc="Reading conversations",
    )


def _read_batch(batch: Mapping[str, list[Any]], format: Format) -> dict[str, list[Any]]:
    rows = zip(*batch.values(), strict=True)
    return read_rows([dict(zip(batch, row, strict=True)) for row in rows], format)


def conversations_of(
    batch: Mapping[str, Any], documents: Sequence[int]
) -> tuple[dict[int, Conversation], dict[int, str]]:
    """Return the conversations of a batch by index, and the reasons why others are none."""
    found: dict[int, Conversation] = {}
    faults: dict[int, str] = {}
    columns = (values(batch[name]) for name in COLUMNS)
    for index, text, roles, ends, untrained, given, fault in zip(documents, *columns, strict=True):
        if fault is not None:
            faults[index] = fault
        else:
            places = tuple(ends), tuple(untrained)
            found[index] = Conversation(text, tuple(roles), *places, given)
    return found, faults


def is_conversations(corpus: datasets.Dataset) -> bool:
    """Test whether a corpus holds conversations, not documents."""
    return ROLES in corpus.column_names
