"""Texts in groups and pieces: the tokens of whole texts, whatever is read at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from vocagnolm import spans
from vocagnolm.texts import pieces
from vocagnolm.texts.tokens import Tokens

Read = Callable[[str, Sequence[str]], tuple[Tokens, list[int]]]
FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")


@pytest.fixture
def read(
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast], monkeypatch: pytest.MonkeyPatch
) -> Read:
    """Read texts, some 500 characters at once; also gives the characters of each call."""
    monkeypatch.setattr(pieces, "AT_ONCE", 500)
    monkeypatch.setattr(pieces, "SHARED", 160)

    def encode(family: str, texts: Sequence[str]) -> tuple[Tokens, list[int]]:
        calls: list[int] = []

        def counted(group: Sequence[str]) -> Tokens:
            calls.append(sum(map(len, group)))
            return spans._encode(tokenizers_by_family[family], group)

        return pieces.encode_in_pieces(counted, texts), calls

    return encode


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_have_the_tokens_of_whole_texts(
    family: str,
    read: Read,
    tokenizers_by_family: dict[str, PreTrainedTokenizerFast],
    fuzz_texts: Callable[..., list[str]],
    training_texts: list[str],
) -> None:
    parts = fuzz_texts(3000, seed=4) + training_texts
    texts = ["".join(parts), "", *parts[:200], "a" * 3000, " ".join(parts[::-1]), "\n" * 3000]
    found, calls = read(family, texts)
    # As a whole.
    expected = spans._encode(tokenizers_by_family[family], texts)
    for name in ("values", "spans", "edges"):
        np.testing.assert_array_equal(vars(found)[name], vars(expected)[name])
    assert found.values.dtype == expected.values.dtype
    whole = [size for size in calls if size > 660]
    assert len(calls) > 100
    assert len(whole) <= 2, "only runs of one character are read as a whole"


def test_groups_are_bounded_and_pieces_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 500)
    monkeypatch.setattr(pieces, "SHARED", 160)
    calls: list[int] = []

    def by_threes(texts: Sequence[str]) -> Tokens:
        """Tokens of three characters from the beginning of whatever is read."""
        calls.append(sum(map(len, texts)))
        at = [np.arange(0, len(text), 3) for text in texts]
        ends = [np.minimum(starts + 3, len(t)) for starts, t in zip(at, texts, strict=True)]
        spans = [np.stack(both, axis=1) for both in zip(at, ends, strict=True)]
        return Tokens.join(at, spans, "int32")

    lengths = (300, 200, 100, 661, 10, 10)
    found = pieces.encode_in_pieces(by_threes, ["x" * length for length in lengths])
    assert np.diff(found.edges).tolist() == [-(-length // 3) for length in lengths]
    # The second piece of the long one has other tokens: it is read as a whole.
    assert calls == [500, 100, 660, 161, 661, 20]
