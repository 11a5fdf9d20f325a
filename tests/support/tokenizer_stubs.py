"""A tokenizer with given offsets, a check of spans, and the tokens of a segment."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from vocagnolm.conventions import Spans
from vocagnolm.spans import Encoding, encode


def assert_spans_hold(spans: Spans, text: str) -> None:
    """Check the promise of `Encoding.spans`, character by character."""
    assert (np.diff(spans, axis=0) >= 0).all()
    owners = dict.fromkeys(range(len(text)), 0)
    for start, end in spans.tolist():
        assert start < end
        for character in range(start, end):
            owners[character] += 1  # KeyError outside the text
    assert not len(spans) or all(owners.values())


_whole = lru_cache(encode)


def tokens_between(tokenizer: Any, text: str, start: int, end: int) -> Encoding:
    """The text's tokens that have a character in a segment, with their spans in it."""
    whole = _whole(tokenizer, text)
    kept = [number for number, (a, b) in enumerate(whole.spans.tolist()) if a < end and b > start]
    return Encoding(whole.ids[kept], whole.spans[kept].clip(start, end) - start)


class StubTokenizer:
    """A tokenizer that returns the offsets it was given. Its tokens have no bytes."""

    name_or_path = "stub"

    def __init__(self, offsets: list[tuple[int, int]] | None) -> None:
        self.encoding = SimpleNamespace(ids=[0] * len(offsets or []), offsets=offsets)
        if offsets is not None:
            self.encode_batch_fast = self.encode_batch
        self.normalizer = self.truncation = self.padding = None
        self.encode_special_tokens = False

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self) -> dict[str, int]:
        return {"?": 0}

    def get_vocab_size(self) -> int:
        return 1

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}

    def encode_batch(self, texts: list[str], **_: object) -> list[SimpleNamespace]:
        return [self.encoding for _ in texts]
