"""Ask a tokenizer for the offsets of its tokens, and test what it is given and gives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from vocagnolm.texts.tokens import Encoding, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_raw(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], name: str, *, literal: bool = True
) -> list[Encoding]:
    """Tokenize texts, with spans as the tokenizer gives them, tested for order and limits.

    What is not `literal` may name special tokens, such as a rendered conversation.
    """
    # The tokenizer itself fails on an empty list.
    if not texts:
        return []
    output = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=literal,
        return_offsets_mapping=True,
        truncation=False,
        padding=False,
        # A text longer than the context is no news: it is cut into segments later.
        verbose=False,
    )
    if "offset_mapping" not in output:
        raise no_offsets(name)
    encodings = []
    columns = zip(texts, output["input_ids"], output["offset_mapping"], strict=True)
    for text, id_list, offsets in columns:
        count = len(id_list) if text else 0
        ids = np.array(id_list[:count], dtype=np.int32)
        spans = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * count).reshape(count, 2)
        if (wrong := find_disorder(spans)) is not None:
            found = spans[max(wrong - 1, 0) : wrong + 1].tolist()
            raise ValueError(
                f"{name} gives offsets that are not in the order of the text ({found} at token"
                f" {wrong}): use the tokenizer that the model was published with"
            )
        if count and (spans[0, 0] < 0 or spans[-1, 1] > len(text)):
            raise ValueError(
                f"{name} gives offsets from {spans[0, 0]} to {spans[-1, 1]} for a text of "
                f"{len(text)} characters"
            )
        encodings.append(Encoding(ids, spans))
    return encodings


def find_disorder(spans: Spans) -> int | None:
    """Find the first span that ends before it starts, or starts or ends before the one before."""
    wrong, falling = spans[:, 0] > spans[:, 1], spans[1:] < spans[:-1]
    # Several times faster than any() on the spans of one text.
    if not np.count_nonzero(wrong) and not np.count_nonzero(falling):
        return None
    wrong[1:] |= falling.any(axis=1)
    return int(wrong.argmax())


def tokenizer_name(tokenizer: PreTrainedTokenizerBase, role: str = "") -> str:
    """Name a tokenizer in an error: its role, where it comes from and its class."""
    where = tokenizer.name_or_path or "in memory"
    return f"{role} tokenizer {where} ({type(tokenizer).__name__})".lstrip()


def no_offsets(name: str) -> ValueError:
    """Make the error for a tokenizer without character offsets."""
    return ValueError(
        f"{name} gives no character offsets: use a fast tokenizer, with a tokenizer.json"
    )
