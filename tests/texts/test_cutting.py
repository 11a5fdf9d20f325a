"""Places to cut a text: between tokens, and inside a character of many tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vocagnolm.cutting import EMPTY, cut_text


def test_no_cut_goes_through_a_token() -> None:
    ours = np.array([[at, at + 1] for at in range(12)])
    # After six of twelve characters a token ends, but the next one begins before that.
    theirs = np.insert(ours, 6, [5, 7], axis=0)
    assert cut_text("x" * 12, [ours, theirs], [8, 100]) == [0, 5, 12]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([[0, 1]] * 4 + [[1, 2]] * 4, [0, 1, 2]),  # equal parts would be of half a character
        ([[0, 1]] * 5 + [[1, 2]], "character 0 alone exceeds a context"),
    ],
)
def test_characters_of_many_tokens_are_cut_apart(spans: list[list[int]], expected: Any) -> None:
    assert cut_text("😀😀", [np.array(spans)], [4]) == expected


def test_text_without_a_token_of_a_model_is_not_cut() -> None:
    spans = [np.array([[0, 1], [1, 2]]), np.empty((0, 2), np.int64)]
    assert cut_text("ab", spans, [4, 4]) == EMPTY
