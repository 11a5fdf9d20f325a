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


def every(width: int, tells_place: bool, calls: list[int]) -> pieces.Encode:
    """Tokens of so many characters each, from the beginning of whatever is read."""

    def encode(texts: Sequence[str]) -> Tokens:
        calls.append(sum(map(len, texts)))
        at = [np.arange(0, len(text), width) for text in texts]
        ends = [np.minimum(starts + width, len(t)) for starts, t in zip(at, texts, strict=True)]
        spans = [np.stack(both, axis=1) for both in zip(at, ends, strict=True)]
        return Tokens.join([starts * tells_place for starts in at], spans, "int32")

    return encode


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([10, 10], [20]),
        ([300, 201], [300, 201]),
        ([500, 300, 200], [500, 500]),
        ([500, 300, 201], [500, 300, 201]),
        # The second piece of the long one has other tokens: it is read as a whole.
        ([300, 200, 100, 661, 10, 10], [500, 100, 660, 161, 661, 20]),
    ],
)
# Tokens of 5 begin at the same places of both pieces, and those of 8 are all the same.
@pytest.mark.parametrize(("width", "tells_place"), [(5, True), (8, False)])
def test_groups_are_bounded_and_pieces_agree(
    lengths: list[int],
    expected: list[int],
    width: int,
    tells_place: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "AT_ONCE", 500)
    monkeypatch.setattr(pieces, "SHARED", 160)
    calls: list[int] = []
    encode = every(width, tells_place, calls)
    found = pieces.encode_in_pieces(encode, ["x" * length for length in lengths])
    assert np.diff(found.edges).tolist() == [-(-length // width) for length in lengths]
    assert calls == expected


def test_million_characters_are_read_at_once() -> None:
    calls: list[int] = []
    found = pieces.encode_in_pieces(every(4, False, calls), ["x" * 2_500_000])
    assert calls == [1_056_768, 1_056_768, 402_848]
    assert found.spans[:, 0].tolist() == [*range(0, 2_500_000, 4)]
