"""Tokens that a server tells by their texts, found in a document and across its windows."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from vocagnolm.spans import encode
from vocagnolm.store.dialects import DIALECTS, PromptTokens
from vocagnolm.store.served import Form, Refused
from vocagnolm.store.served_text import LEAST_CONTEXT, ServedReader, find_spans, joint
from vocagnolm.store.server import Server
from vocagnolm.store.windows import Unscored

SPANS = {
    "whole tokens": ("a bc", ["a", " bc"], [[0, 1], [1, 4]]),
    "parts as U+FFFD": ("a 😀b", ["a", " \ufffd", "\ufffd", "b"], [[0, 1], [1, 3], [2, 3], [3, 4]]),
    "parts as nothing": ("😀b", ["", "", "b"], [[0, 1], [0, 1], [1, 2]]),
    "the last part has it all": ("é!", ["", "é", "!"], [[0, 1], [0, 1], [1, 2]]),
    "a part and more": ("éx", ["\ufffd", "\ufffdx"], [[0, 1], [0, 2]]),
    "spaces left out": ("the  cat", ["the", "cat"], [[0, 3], [3, 8]]),
    "a space alone before it": ("7 a", [" ", "7", " a"], [[0, 1], [0, 1], [1, 3]]),
    "a space before it": ("the cat", [" the", " cat"], [[0, 3], [3, 7]]),
    "U+FFFD in the text": ("a\ufffd b", ["a", "\ufffd", " b"], [[0, 1], [1, 2], [2, 4]]),
    "two in parts": ("😀😀a", ["\ufffd"] * 4 + ["a"], None),
    "a lie": ("one two", ["one", " tow"], None),
    "too little": ("one two", ["one"], None),
    "too much": ("one", ["one", " two"], None),
}


@pytest.mark.parametrize("case", SPANS)
def test_spans_are_found_by_texts(case: str) -> None:
    text, pieces, expected = SPANS[case]
    if expected is None:
        with pytest.raises(ValueError, match="token"):
            find_spans(text, pieces)
    else:
        assert find_spans(text, pieces).tolist() == expected


CONTEXT, MIN_CONTEXT, SERVER_CONTEXT = 48, 8, 90


class AskedReader(ServedReader):
    """Answers itself: the loss of every token is its id."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, context: int = CONTEXT, least: int = MIN_CONTEXT
    ):
        super().__init__(Server("http://localhost", 1), "", context, least)
        self.form = Form(DIALECTS["openai"], "")
        self.tokenizer, self.refused = tokenizer, "<none>"
        # Tokens of each request.
        self.asked: list[int] = []

    async def ask(self, client: Any, prompt: Any, check: Any, times: int | None = None) -> Any:
        ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        self.asked.append(len(ids))
        assert len(self.asked) < 1000, "it asks for ever"
        if len(ids) >= SERVER_CONTEXT or self.refused in prompt:
            return Refused("too long")
        start = self.tokenizer.decode([0])
        texts = [self.tokenizer.decode([0, one])[len(start) :] for one in ids]
        try:
            return check(PromptTokens([math.nan, *map(float, ids)], texts=[None, *texts]))
        except ValueError as error:
            return Unscored(str(error))


@pytest.mark.parametrize("family", ["metaspace", "prepend", "byte_level", "nfc_digits", "trimmed"])
def test_windows_have_the_tokens_of_the_whole_text(
    family: str,
    tokenizers_by_family: dict[str, PreTrainedTokenizerBase],
    training_texts: list[str],
    fuzz_texts: Callable[..., list[str]],
) -> None:
    tokenizer, rng = tokenizers_by_family[family], random.Random(0)
    fuzz = [text for text in fuzz_texts(400, seed=3) if "<unk>" not in text]
    for number in range(40):
        parts = rng.sample(training_texts[:-1], 4)
        is_plain = number % 2
        if not is_plain:
            parts[2:2] = rng.sample(fuzz, 3)
        text, reader = " ".join(parts), AskedReader(tokenizer)
        found = asyncio.run(reader._read(None, text))  # type: ignore[arg-type]
        if not is_plain and isinstance(found, Unscored):
            continue
        assert not isinstance(found, Unscored), found.reason
        expected = encode(tokenizer, text)
        assert np.array_equal(found[0], expected.spans)
        assert found[1].tolist() == expected.ids.tolist()
        assert sum(count < CONTEXT for count in reader.asked) >= 2


UNWORDLY = {"at its end": "the cat " * 600 + "abc" * 150, "nowhere": "0123456789x" * 60}


@pytest.mark.parametrize("where", UNWORDLY)
def test_windows_need_no_words(
    where: str, tokenizers_by_family: dict[str, PreTrainedTokenizerBase]
) -> None:
    tokenizer, text = tokenizers_by_family["byte_level"], UNWORDLY[where]
    found = asyncio.run(AskedReader(tokenizer)._read(None, text))  # type: ignore[arg-type]
    assert not isinstance(found, Unscored), found.reason
    assert found[1].tolist() == encode(tokenizer, text).ids.tolist()


@pytest.mark.parametrize("context", [LEAST_CONTEXT, CONTEXT])
def test_window_of_too_many_tokens_is_cut_once(
    context: int, tokenizers_by_family: dict[str, PreTrainedTokenizerBase]
) -> None:
    tokenizer, text = tokenizers_by_family["nfc_digits"], "0123456789" * 60
    reader = AskedReader(tokenizer, context, context // 4)
    found = asyncio.run(reader._read(None, text))  # type: ignore[arg-type]
    assert not isinstance(found, Unscored), found.reason
    assert found[1].tolist() == encode(tokenizer, text).ids.tolist()
    over = next(at for at, asked in enumerate(reader.asked) if context <= asked < SERVER_CONTEXT)
    assert reader.asked[over + 1] == int(0.9 * context) - 1


def test_character_of_many_tokens_ends_the_windows(
    tokenizers_by_family: dict[str, PreTrainedTokenizerBase],
) -> None:
    reader = AskedReader(tokenizers_by_family["metaspace"], LEAST_CONTEXT, 2)
    found = asyncio.run(reader._read(None, "qz7\U0001f9ff"))  # type: ignore[arg-type]
    assert isinstance(found, Unscored)
    assert reader.asked == [8, 4, 8]


def test_refusal_of_a_further_window_is_told(
    tokenizers_by_family: dict[str, PreTrainedTokenizerBase],
) -> None:
    reader = AskedReader(tokenizers_by_family["byte_level"])
    reader.refused, reader._min_context = "7", 24
    found = asyncio.run(reader._read(None, "the cat " * 200 + "7"))  # type: ignore[arg-type]
    assert isinstance(found, Unscored)
    assert found.reason == "too long"


WORDS = [[0, 2], [2, 3], [3, 5], [5, 6]]
JOINTS = {
    "the last of two": (WORDS, [[2, 3], [3, 5], [5, 6]], 1, (3, 2)),
    "the end is cut otherwise": (WORDS, [[2, 3], [3, 5], [5, 8]], 1, (2, 1)),
    "too little context": (WORDS, [[2, 3], [3, 5], [5, 8]], 2, None),
    "alike long before the end": (
        [[at, at + 1] for at in range(9)],
        [[0, 1], [1, 2], [2, 9], [9, 12]],
        1,
        (1, 1),
    ),
    "none alike": (WORDS, [[2, 4], [4, 6]], 0, None),
    "within a character": ([[0, 1], [1, 2], [1, 2]], [[1, 2], [1, 2], [2, 3]], 1, None),
}


@pytest.mark.parametrize("case", JOINTS)
def test_windows_are_joined_where_both_agree(case: str) -> None:
    one, other, least, expected = JOINTS[case]
    assert joint(np.array(one), np.array(other), least) == expected
