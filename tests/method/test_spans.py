"""Encoding, gap filling, and the self-test of tokenizers at load."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_stubs import StubTokenizer, assert_spans_hold
from tokenizers import Tokenizer, models, normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

import vocagnolm.spans
from vocagnolm.conventions import Spans
from vocagnolm.spans import (
    composed_ranges,
    encode,
    encode_batch,
    encode_ids,
    encode_rendered,
    fill_gaps,
)
from vocagnolm.token_bytes import TokenBytes, byte_level, sentencepiece
from vocagnolm.tokenizer import check_tokenizer, load_tokenizer, tokenizer_sha256

FAMILIES = ("metaspace", "prepend", "byte_level", "nfc_digits", "trimmed", "unigram")
Tokenizers = dict[str, PreTrainedTokenizerFast]


# encode


@pytest.mark.parametrize("family", FAMILIES)
def test_encode_covers_every_character_when_texts_are_fuzz(
    tokenizers_by_family: Tokenizers, fuzz_texts: Callable[..., list[str]], family: str
) -> None:
    texts = fuzz_texts(2000, seed=2)
    lossless = 0
    for text, encoding in zip(
        texts, encode_batch(tokenizers_by_family[family], texts), strict=True
    ):
        assert encoding.ids.dtype == np.int32
        assert encoding.spans.dtype == np.int64
        assert encoding.spans.shape == (len(encoding.ids), 2)
        assert_spans_hold(encoding.spans, text)
        lossless += len(encoding.ids) > 0 or not text
    assert family == "unigram" or lossless == len(texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_give_the_spans_of_offsets(
    tokenizers_by_family: Tokenizers,
    fuzz_texts: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    tokenizer, texts = tokenizers_by_family[family], fuzz_texts(1000, seed=6)
    expected = vocagnolm.spans.encode_raw(tokenizer, texts)
    encode_batch(tokenizer, texts[:1])  # the probe
    raw = Mock(wraps=vocagnolm.spans.encode_raw)
    monkeypatch.setattr(vocagnolm.spans, "encode_raw", raw)
    found = encode_batch(tokenizer, texts)
    for text, one, same in zip(texts, found, expected, strict=True):
        np.testing.assert_array_equal(one.ids, same.ids)
        filled = fill_gaps(same.spans, text)
        # Offsets give the first bytes of a composed letter only its first character.
        assert (one.spans[:, 0] <= filled[:, 0]).all()
        assert (one.spans[:, 1] >= filled[:, 1]).all()
        if family not in ("nfc_digits", "unigram") or unicodedata.is_normalized("NFC", text):
            np.testing.assert_array_equal(one.spans, filled)
    # trimmed and unigram drop or trim white space.
    asked = sum(len(call.args[1]) for call in raw.call_args_list)
    assert asked < 500 if family not in ("trimmed", "unigram") else asked == 1000


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("byte_level", "a 數", [(0, 1), (1, 2), (2, 3), (2, 3), (2, 3)]),
        ("metaspace", " 😀", [(0, 1), (1, 2)]),
        ("metaspace", "\U0001d538", [(0, 1)] * 5),  # the prefix and four bytes share a character
        ("nfc_digits", "12", [(0, 1), (1, 2)]),
        ("nfc_digits", "é x", [(0, 1), (1, 2), (2, 3)]),
        ("nfc_digits", "e\u0301 x", [(0, 2), (2, 3), (3, 4)]),  # the accent is the letter's
        ("nfc_digits", "xe\u0301", [(0, 1), (1, 3)]),  # also at the end
        ("trimmed", "x   y", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]),
        ("trimmed", "x   and", [(0, 1), (1, 2), (2, 3), (3, 7)]),
        ("trimmed", "x  ", [(0, 1), (1, 2), (2, 3)]),
        ("unigram", "  x\n\n12\n", [(0, 3), (2, 3), (3, 8)]),
        ("unigram", " \n ", []),
    ],
)
def test_encode_gives_the_worked_spans(
    tokenizers_by_family: Tokenizers, family: str, text: str, expected: list[tuple[int, int]]
) -> None:
    spans = encode(tokenizers_by_family[family], text).spans
    assert spans.shape == (len(expected), 2)
    assert spans.tolist() == np.reshape(expected, (-1, 2)).tolist()


def test_empty_text_has_no_tokens_whatever_is_said() -> None:
    tokenizer: Any = StubTokenizer([(0, 0), (0, 0)])
    assert encode(tokenizer, "").ids.shape == (0,)


@pytest.mark.parametrize("length", [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["metaspace", "nfc_digits"])
def test_encode_covers_a_long_text(
    tokenizers_by_family: Tokenizers, family: str, length: int
) -> None:
    text = ("e\u0301  12 " * 150_000)[:length]
    spans = encode(tokenizers_by_family[family], text).spans
    assert spans[0, 0] == 0
    assert spans[-1, 1] == len(text)
    assert (spans[1:, 0] <= spans[:-1, 1]).all()


@pytest.mark.parametrize("family", ["metaspace", "prepend", "byte_level", "nfc_digits", "trimmed"])
def test_special_strings_stay_text(tokenizers_by_family: Tokenizers, family: str) -> None:
    tokenizer = tokenizers_by_family[family]
    text = f"a {' '.join(tokenizer.all_special_tokens)} b"
    encoding = encode(tokenizer, text)
    assert not set(encoding.ids.tolist()) & set(tokenizer.all_special_ids)
    assert_spans_hold(encoding.spans, text)
    # By default the tokenizer does find them, so the test can fail.
    assert set(tokenizer(text).input_ids) & set(tokenizer.all_special_ids)


def test_special_tokens_leave_white_space_to_contents(tokenizer_dirs: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(tokenizer_dirs["byte_level"]), "student")
    tokenizer.add_tokens([AddedToken("<|t|>", special=True, rstrip=True)])
    text = "<|t|>  a<|t|> b<|t|>"
    (found,) = encode_rendered(tokenizer, [text])
    places = found.spans[found.ids == tokenizer.convert_tokens_to_ids("<|t|>")]
    assert [text[start:end] for start, end in places] == ["<|t|>"] * 3
    assert_spans_hold(found.spans, text)


def test_added_token_keeps_its_span_where_it_is_spelt_otherwise() -> None:
    backend = Tokenizer(models.BPE({sign: n for n, sign in enumerate("abx<> ")}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens([AddedToken("<x>", lstrip=True, rstrip=True, normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    spelt, otherwise = encode_rendered(tokenizer, ["a <x> b", "a <X> b"])
    assert spelt.spans.tolist() == [[0, 1], [1, 5], [5, 7]]
    assert otherwise.spans.tolist() == [[0, 1], [1, 6], [6, 7]]


def test_encode_rejects_a_lone_surrogate(student_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="position 2: surrogates not allowed"):
        encode_batch(student_tokenizer, ["fine", "ab\ud800c"])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (None, "no character offsets"),
        ([(0, 1), (1, 3), (0, 0)], r"in the order .*\(\[\[1, 3\], \[0, 0\]\] at"),
        ([(0, 3), (1, 2)], r"in the order .*\(\[\[0, 3\], \[1, 2\]\] at"),
        ([(2, 1)], "in the order"),
        ([(0, 1), (1, 999)], "from 0 to 999 "),
        ([(-1, 1)], "from -1 to 1 "),
    ],
)
def test_encode_and_check_reject_when_offsets_are_unusable(
    offsets: list[tuple[int, int]] | None, message: str
) -> None:
    tokenizer: Any = StubTokenizer(offsets)
    with pytest.raises(ValueError, match=rf"^tokenizer stub \(StubTokenizer\) .*{message}"):
        encode(tokenizer, "text")
    with pytest.raises(ValueError, match=rf"^teacher tokenizer stub \(StubTokenizer\) .*{message}"):
        check_tokenizer(tokenizer, "teacher")


# fill_gaps


def gap_oracle(spans: Spans, text: str) -> list[set[int]]:
    """The characters of each token, by the rule, one character at a time (no empty spans)."""
    owned = [set(range(start, end)) for start, end in spans.tolist()]
    covered = set().union(*owned)
    for character in set(range(len(text))) - covered:
        before = [i for i, (_, end) in enumerate(spans.tolist()) if end <= character]
        after = [i for i, (start, _) in enumerate(spans.tolist()) if start > character]
        stop = spans[after[0], 0] if after else len(text)
        space_until_next = text[character:stop].isspace()
        follows = after and (space_until_next or not before)
        owned[after[0] if follows else before[-1]].add(character)
    return owned


@st.composite
def texts_and_spans(draw: st.DrawFn, smallest: int) -> tuple[str, Spans]:
    text = draw(st.text("ab \n\u3000\u0301😀", min_size=1, max_size=25))
    starts = sorted(draw(st.lists(st.integers(0, len(text) - 1), min_size=1, max_size=8)))
    lengths = draw(st.lists(st.integers(smallest, 4), min_size=8, max_size=8))
    ends = [start + length for start, length in zip(starts, lengths, strict=False)]
    ends = np.minimum(np.maximum.accumulate(ends), len(text)).tolist()
    return text, np.array(list(zip(starts, ends, strict=True)), dtype=np.int64)


@given(texts_and_spans(smallest=1))
def test_fill_gaps_follows_the_rule(case: tuple[str, Spans]) -> None:
    text, spans = case
    before = spans.copy()
    filled = fill_gaps(spans, text)
    assert [set(range(start, end)) for start, end in filled.tolist()] == gap_oracle(spans, text)
    assert_spans_hold(filled, text)
    np.testing.assert_array_equal(spans, before)  # the argument is unchanged


@given(texts_and_spans(smallest=0))
def test_fill_gaps_leaves_no_empty_span(case: tuple[str, Spans]) -> None:
    text, spans = case
    filled = fill_gaps(spans, text)
    assert_spans_hold(filled, text)
    assert (filled[:, 0] <= spans[:, 0]).all() or (spans[:, 0] == spans[:, 1]).any()
    assert (filled[:, 1] >= spans[:, 1]).all()
    assert fill_gaps(filled, text) is filled


@pytest.mark.parametrize(
    ("text", "spans", "expected"),
    [
        ("ab", [[-3, -1], [-2, 9], [1, 9]], [[0, 1], [0, 2], [1, 2]]),  # clamped
        ("ab", [[0, 2], [2, 2], [2, 2]], [[0, 2], [1, 2], [1, 2]]),
        ("ab", [[0, 0], [0, 2]], [[0, 1], [0, 2]]),
        ("ab", [], []),
        ("", [], []),
    ],
)
def test_fill_gaps_gives_the_worked_example(
    text: str, spans: list[list[int]], expected: list[list[int]]
) -> None:
    filled = fill_gaps(np.array(spans, dtype=np.int64).reshape(-1, 2), text)
    assert filled.tolist() == expected
    assert filled.dtype == np.int64


def test_tokenizer_is_left_as_it_was(tokenizers_by_family: Tokenizers) -> None:
    """Settings that a call left on a tokenizer stay, and change neither spans nor its key."""
    for tokenizer in tokenizers_by_family.values():
        text = "Let x = 2, then x + x = 4."
        expected, key = encode(tokenizer, text), tokenizer_sha256(tokenizer)
        backend = tokenizer.backend_tokenizer
        backend.enable_truncation(3, stride=1)
        backend.enable_padding(length=40, pad_id=1)
        backend.encode_special_tokens = False
        before = backend.to_str()
        found = encode(tokenizer, text)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.spans.tolist() == expected.spans.tolist()
        encode_rendered(tokenizer, [text])
        assert tokenizer_sha256(tokenizer) == key
        assert backend.to_str() == before
        assert not backend.encode_special_tokens
        backend.no_truncation()
        backend.no_padding()


def test_token_of_a_composed_letter_has_all_its_characters(
    tokenizers_by_family: Tokenizers,
) -> None:
    """It has every character of which it has a byte, as in all other texts."""
    tokenizer = tokenizers_by_family["nfc_digits"]
    text = unicodedata.normalize("NFD", "é ṩ ạ́b 한국 Poincaré ệ. q\u0323\u0307 e\u0301\u0316x")
    spans = encode(tokenizer, text).spans
    assert_spans_hold(spans, text)
    table = TokenBytes(tokenizer.backend_tokenizer, byte_level)
    composed = unicodedata.normalize("NFC", text)
    ids = encode(tokenizer, composed).ids
    assert ids.tolist() == encode(tokenizer, text).ids.tolist()
    edges = np.array([0, len(ids)])
    of_composed, wrong = table.find(ids, edges, [composed], [composed.encode()])
    assert not wrong
    # The place of each composed character in the text, cluster by cluster.
    places, at = [], 0
    for character in composed:
        size = len(unicodedata.normalize("NFD", character))
        places.append((at, at + size))
        at += size
    assert at == len(text)
    assert composed_ranges("e\u0301\u0316") == [(0, 2)]  # the second mark stays
    assert composed_ranges("a\u0301\u0323") == [(0, 3)]  # the marks change places
    for (first, last), (start, end) in zip(of_composed.tolist(), spans.tolist(), strict=True):
        assert start <= places[first][0]
        assert end >= places[last - 1][1]


def test_widening_takes_no_longer_where_many_letters_are_composed() -> None:
    text = unicodedata.normalize("NFD", "한국어 텍스트 " * 20_000)
    spans = np.stack((np.arange(len(text)), np.arange(1, len(text) + 1)), axis=1)
    began = time.process_time()
    vocagnolm.spans._widen_composed(spans, text)
    assert time.process_time() - began < 5
    assert_spans_hold(spans, text)


def test_space_before_an_empty_text_has_no_character(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["metaspace"]
    table = TokenBytes(tokenizer.backend_tokenizer, sentencepiece)
    ids = np.array([tokenizer.convert_tokens_to_ids("▁")], np.int32)
    assert table.find(ids, np.array([0, 1]), [""], [b""])[1] == [0]
    assert table.find(ids[:0], np.array([0, 0]), [""], [b""])[1] == []
    assert table.find(ids, np.array([0, 1]), [" "], [b" "])[1] == []


# Given ids, and tokenizers without transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_tokenizer_gives_the_same(
    tokenizers_by_family: Tokenizers, fuzz_texts: Callable[..., list[str]], family: str
) -> None:
    fast = tokenizers_by_family[family]
    backend = fast.backend_tokenizer
    backend.enable_truncation(4)
    before = backend.to_str()
    for text in fuzz_texts(200, seed=3):
        plain, expected = encode(backend, text), encode(fast, text)
        assert plain.ids.tolist() == expected.ids.tolist()
        assert plain.spans.tolist() == expected.spans.tolist()
    assert backend.to_str() == before
    backend.no_truncation()


@pytest.mark.parametrize("family", ["metaspace", "prepend", "byte_level"])
def test_given_ids_have_the_spans_of_their_bytes(
    tokenizers_by_family: Tokenizers, family: str
) -> None:
    tokenizer = tokenizers_by_family[family]
    text = "Let x_1 = 22, 😀 für alle."
    canonical = encode(tokenizer, text)
    given_canonical = encode_ids(tokenizer, canonical.ids, text)
    assert given_canonical.spans.tolist() == canonical.spans.tolist()
    # The same text letter by letter, which no tokenizer would give.
    word = "alle"
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in word]
    assert encode_ids(tokenizer, ids, word).spans.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]
    assert len(encode(tokenizer, word).ids) < 4 or family == "prepend"


def test_ids_that_do_not_spell_the_text_are_rejected(tokenizers_by_family: Tokenizers) -> None:
    tokenizer = tokenizers_by_family["byte_level"]
    ids = encode(tokenizer, "one").ids
    with pytest.raises(ValueError, match="spell"):
        encode_ids(tokenizer, ids, "two")
    for wrong in (-1, 10**6):
        with pytest.raises(ValueError, match=f"id {wrong}"):
            encode_ids(tokenizer, [*ids, wrong], "one")
    # Where white space is trimmed, bytes tell nothing.
    with pytest.raises(ValueError, match="bytes"):
        encode_ids(tokenizers_by_family["trimmed"], [1], "one")
