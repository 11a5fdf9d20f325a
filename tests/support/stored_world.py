"""Teacher-loss stores for tests: of random losses, or of what a model says of given segments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from tokenizer_stubs import tokens_between

from vocagnolm.data import Segments
from vocagnolm.readers import Reader
from vocagnolm.spans import encode
from vocagnolm.store.format import (
    LossDtype,
    Store,
    StoredSegment,
    document_key,
    finish_store,
    write_shard,
)
from vocagnolm.store.windows import HFScorer, Window

CONTEXT = 100_000  # no document of a test is longer


def write_store(
    directory: Path,
    segments: Iterable[tuple[str, StoredSegment]],
    *,
    context: int = CONTEXT,
    teacher: str = "some/teacher",
    loss_dtype: LossDtype = "float32",
) -> Store:
    """A store of segments, each with the document it is of, in two shards."""
    directory.mkdir(parents=True)
    keyed = [(document_key(text), segment) for text, segment in segments]
    half = len(keyed) // 2
    for number, part in enumerate((keyed[:half], keyed[half:])):
        write_shard(directory, number, part, loss_dtype)
    description = {"teacher": teacher, "tokenizer_sha256": "", "context": context}
    finish_store(directory, description)
    return Store(directory)


def random_store(
    directory: Path, texts: Sequence[str], tokenizer: Any, *, seed: int = 0, **options: Any
) -> Store:
    """A store of whole documents with random losses; none of texts without a token."""
    rng = np.random.default_rng(seed)
    segments = []
    for text in dict.fromkeys(texts):
        spans = encode(tokenizer, text).spans
        if len(spans):
            losses = rng.uniform(0, 8, len(spans)).astype(np.float32)
            segments.append((text, StoredSegment(0, len(text), spans, losses)))
    return write_store(directory, segments, **options)


def segment_store(
    directory: Path,
    texts: Sequence[str],
    segments: Segments,
    reader: Reader,
    model: Any,
    **options: Any,
) -> Store:
    """A store of a model's losses on just the segments that an online teacher would be shown."""
    columns = segments.rows.select_columns(["document", "start", "end", "teacher_ids"])
    rows = list(columns)
    asked = [
        Window(n, row["teacher_ids"], len(row["teacher_ids"]) - 1) for n, row in enumerate(rows)
    ]
    losses = HFScorer(model, 4096).losses(asked)
    stored = []
    for row, found in zip(rows, losses, strict=True):
        text, start, end = texts[row["document"]], row["start"], row["end"]
        spans = tokens_between(reader.tokenizer, text, start, end).spans + start
        stored.append((text, StoredSegment(start, end, spans, found)))
    return write_store(directory, stored, context=reader.limit, **options)


def in_memory(texts: Sequence[str]) -> datasets.Dataset:
    """A corpus of texts."""
    return datasets.Dataset.from_dict({"text": list(texts)})
