"""Teacher-loss stores for tests: of random losses, or of a model's losses on whole documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from vocagnolm.readers import Reader
from vocagnolm.spans import encode
from vocagnolm.store.format import (
    LossDtype,
    Store,
    StoredDocument,
    document_key,
    finish_store,
    write_shard,
)
from vocagnolm.store.windows import HFScorer, Window

CONTEXT = 100_000  # more than any document of the tests has


def write_store(
    directory: Path,
    documents: Iterable[tuple[str, StoredDocument]],
    *,
    context: int = CONTEXT,
    teacher: str = "some/teacher",
    loss_dtype: LossDtype = "float32",
) -> Store:
    """A store of documents, in two shards."""
    directory.mkdir(parents=True)
    keyed = [(document_key(text), document) for text, document in documents]
    half = len(keyed) // 2
    for number, part in enumerate((keyed[:half], keyed[half:])):
        write_shard(directory, number, part, loss_dtype)
    description = {"teacher": teacher, "tokenizer_sha256": "", "context": context}
    finish_store(directory, description)
    return Store(directory)


def random_store(
    directory: Path, texts: Sequence[str], tokenizer: Any, *, seed: int = 0, **options: Any
) -> Store:
    """A store of whole documents with random losses, without texts that have no token."""
    rng = np.random.default_rng(seed)
    documents = []
    for text in dict.fromkeys(texts):
        spans = encode(tokenizer, text).spans
        if len(spans):
            losses = rng.uniform(0, 8, len(spans)).astype(np.float32)
            documents.append((text, StoredDocument(len(text), spans, losses)))
    return write_store(directory, documents, **options)


def scored_store(
    directory: Path, texts: Sequence[str], reader: Reader, model: Any, **options: Any
) -> Store:
    """A store of an online teacher's losses on documents that it reads whole."""
    encodings = [encode(reader.tokenizer, text) for text in texts]
    asked = [
        Window(number, [reader.start, *encoding.ids], len(encoding.ids))
        for number, encoding in enumerate(encodings)
    ]
    losses = HFScorer(model, 4096).losses(asked)
    documents = [
        (text, StoredDocument(len(text), encoding.spans, text_losses))
        for text, encoding, text_losses in zip(texts, encodings, losses, strict=True)
    ]
    return write_store(directory, documents, context=reader.limit, **options)


def in_memory(texts: Sequence[str]) -> datasets.Dataset:
    """A corpus of texts."""
    return datasets.Dataset.from_dict({"text": list(texts)})
