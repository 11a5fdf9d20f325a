"""Difference of two stores of one corpus: a served or quantized teacher beside the exact one."""

import math
from dataclasses import dataclass

import numpy as np

from vocagnolm.store.reader import spans_and_losses
from vocagnolm.store.store import Store


@dataclass(frozen=True)
class StoreDifference:
    """Losses of the tokens that two stores have, and documents in which their tokens differ.

    The correlation is Pearson's, NaN where a store's losses are all the same.
    """

    tokens: int
    correlation: float
    mean_nats: float
    largest_nats: float
    documents: int
    not_alike: int


def difference(one: Store, other: Store) -> StoreDifference:
    """Compare the losses of all documents; a ValueError where the stores are of other texts.

    A document that one of them keeps without tokens, or cuts otherwise, is counted and left out.
    """
    keys = one.document_keys()
    if keys != other.document_keys():
        apart = len(keys ^ other.document_keys())
        raise ValueError(
            f"{one.directory} and {other.directory} are stores of different corpora: {apart:,} "
            "documents are in one of them only; compare stores of one corpus"
        )
    hashes = {store.manifest["tokenizer_sha256"] for store in (one, other)}
    if len(hashes - {"unknown"}) > 1:
        raise ValueError(
            f"{one.directory} and {other.directory} have the losses of different tokens, as their "
            "teachers have different tokenizers: compare what they select with vocagnolm reselect"
        )
    # Counts, and sums of x, y, x squared, y squared, x times y.
    tokens, not_alike, sums, apart_nats, largest = 0, 0, np.zeros(5), 0.0, 0.0
    for key in sorted(keys):
        both = (spans_and_losses(store.of_key(key)) for store in (one, other))
        (x_spans, x), (y_spans, y) = both
        if not len(x) or not np.array_equal(x_spans, y_spans):
            not_alike += 1
            continue
        x, y = x.astype(np.float64), y.astype(np.float64)
        apart_N = np.abs(x - y)
        tokens += len(x)
        sums += [x.sum(), y.sum(), x @ x, y @ y, x @ y]
        apart_nats, largest = apart_nats + apart_N.sum(), max(largest, apart_N.max())
    if not tokens:
        raise ValueError(f"{one.directory} and {other.directory} have no document cut alike")
    x_mean, y_mean, x_square, y_square, product = sums / tokens
    spread = math.sqrt(max(0.0, (x_square - x_mean**2) * (y_square - y_mean**2)))
    correlation = (product - x_mean * y_mean) / spread if spread else math.nan
    return StoreDifference(tokens, correlation, apart_nats / tokens, largest, len(keys), not_alike)
