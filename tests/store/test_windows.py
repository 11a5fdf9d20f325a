"""Losses of documents of any length: windows, and batches."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from vocagnolm.store.windows import HFScorer, Window, windows

VOCABULARY, START = 90, 1


@given(st.integers(0, 200), st.integers(3, 40), st.data())
@example(0, 3, None)
@example(200, 3, None)
def test_windows_score_every_token_once_with_enough_context(
    tokens: int, context: int, data: Any
) -> None:
    min_context = data.draw(st.integers(1, context - 2)) if data else 1
    ids = list(range(100, 100 + tokens))  # all different, so that an id is a place
    found = list(windows(7, [START, *ids], context, min_context))
    scored: list[int] = []
    for window in found:
        assert window.document == 7
        assert window.ids[0] == START
        assert len(window.ids) <= context
        text = window.ids[1:]
        assert text == list(range(text[0], text[0] + len(text)))
        before = len(text) - window.scored
        assert window.scored >= 1
        assert before >= min_context or text[0] == ids[0]
        scored += text[before:]
    assert scored == ids
    # No more windows than needed: each but the last one is full.
    assert all(len(window.ids) == context for window in found[:-1])


def test_windows_end_when_the_context_leaves_no_room() -> None:
    with pytest.raises(AssertionError):
        list(itertools.islice(windows(0, list(range(9)), 5, 4), 20))


# Hugging Face models


@pytest.fixture(scope="module")
def model(tiny_llama: Callable[..., Any]) -> Any:
    """A model with another loss for every token; read-only by convention."""
    return tiny_llama(VOCABULARY, initializer_range=0.3)


@pytest.fixture(scope="module")
def asked() -> list[Window]:
    """Windows of many lengths, shuffled, with all or only the last tokens scored."""
    rng = random.Random(0)
    found = []
    for number in range(40):
        tokens = rng.choice([1, 1, 2, 3, 5, 8, 13, 40, 100])
        ids = [START, *(rng.randrange(VOCABULARY) for _ in range(tokens))]
        found.append(Window(number, ids, rng.choice([tokens, rng.randint(1, tokens)])))
    return found


def slow_losses(model: Any, window: Window) -> np.ndarray[Any, Any]:
    """Losses from the full logits of a single window."""
    ids = torch.tensor(window.ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0].double()
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none")[-window.scored :].numpy()


@pytest.fixture(scope="module")
def packing_model(model: Any) -> Any:
    """The same model with attention that takes segments."""
    copied = copy.deepcopy(model)
    copied.set_attn_implementation("torch_varlen")
    return copied


@pytest.mark.parametrize("batch_tokens", [1, 64, 300, 10_000])
@pytest.mark.parametrize("packs", [False, True])
def test_batched_windows_have_the_losses_of_single_ones(
    model: Any, packing_model: Any, asked: list[Window], batch_tokens: int, packs: bool
) -> None:
    losses = HFScorer(packing_model if packs else model, batch_tokens).losses(asked)
    assert len(losses) == len(asked)
    for window, row in zip(asked, losses, strict=True):
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, slow_losses(model, window), rtol=0, atol=1e-5)


def test_hf_scorer_keeps_batches_within_their_tokens(
    model: Any, asked: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, int]] = []
    scorer = HFScorer(model, 64)
    inner = scorer._batch_losses

    def watched(batch: Sequence[Window]) -> Any:
        shapes.append((len(batch), max(len(window.ids) for window in batch)))
        return inner(batch)

    monkeypatch.setattr(scorer, "_batch_losses", watched)
    scorer.losses(asked)
    assert all(rows * length <= 64 or rows == 1 for rows, length in shapes)
    assert max(rows for rows, _ in shapes) > 5
    padded = sum(rows * length for rows, length in shapes)
    assert padded < 1.3 * sum(len(window.ids) for window in asked)


def test_packed_windows_have_no_padding_and_the_head_reads_what_is_scored(
    packing_model: Any, asked: list[Window], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, counts = [], []
    scorer = HFScorer(packing_model, 64)

    def watched(*, input_ids: Tensor, label_tokens: int, **_: object) -> Tensor:
        shapes.append(tuple(input_ids.shape))
        counts.append(label_tokens)
        return torch.zeros(input_ids.shape)

    monkeypatch.setattr(packing_model, "forward", watched)
    scorer.losses(asked)
    tokens = [length for _, length in shapes]
    assert {rows for rows, _ in shapes} == {1}
    assert sum(tokens) == sum(len(window.ids) for window in asked)
    assert sum(counts) == sum(window.scored for window in asked)
    # What does not fit is a window longer than a batch.
    longest = sum(len(window.ids) > 64 for window in asked)
    assert sum(length > 64 for length in tokens) == longest
    assert len(tokens) < longest + 6


def test_hf_scorer_freezes_its_model(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(VOCABULARY).train()
    HFScorer(model, 1)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
