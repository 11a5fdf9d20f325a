"""Ends of packed documents, and attention that needs them."""

from __future__ import annotations

import pytest
import torch
from architectures import build
from packed_rows import SEGMENTS, rows, with_attention

from vocagnolm.attention import segments_of
from vocagnolm.token_loss import add_token_losses


def test_packed_rows_without_segments_are_rejected() -> None:
    batch = rows()
    model = with_attention("llama", "torch_varlen")
    for attention in ("flash_attention_2", "torch_varlen"):
        model.config._attn_implementation = attention
        with pytest.raises(ValueError, match=rf"{attention} does not separate .* pass segments="):
            model(**batch)
    with pytest.raises(ValueError, match="cannot be combined"):
        model(**batch, segments=SEGMENTS, attention_mask=torch.ones(3, 16))
    del batch["position_ids"]
    with pytest.raises(ValueError, match="needs input_ids"):
        model(**batch, segments=SEGMENTS)


def test_configuration_that_tells_enough_is_rejected_at_once() -> None:
    with pytest.raises(ValueError, match=r"dropout of 0.1: set it to 0"):
        with_attention("llama", "torch_varlen", attention_dropout=0.1)
    frozen = build(attention_dropout=0.1).requires_grad_(False)
    frozen.set_attn_implementation("torch_varlen")
    add_token_losses(frozen)  # never in training mode: nothing is dropped
    with pytest.raises(ValueError, match="needs chunked attention"):
        with_attention("llama", "torch_varlen", attention_chunk_size=8)
    model = build()
    model.set_attn_implementation("torch_varlen")
    model.model.forward = lambda input_ids, position_ids=None: None
    with pytest.raises(ValueError, match="does not accept document boundaries"):
        add_token_losses(model)


def test_segments_are_cumulative_lengths_when_some_are_empty() -> None:
    assert segments_of([3, 0, 4]).edges.tolist() == [0, 3, 7]
    assert segments_of([3, 0, 4]).longest == 4
    assert (segments_of([]).edges.tolist(), segments_of([]).longest) == ([0], 0)
