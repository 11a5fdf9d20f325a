"""Ends of packed documents, and attention that needs them."""

from __future__ import annotations

import pytest
from architectures import SEGMENTS, rows, with_attention

from vocagnolm.attention import segments_of


def test_packed_rows_without_segments_are_rejected() -> None:
    batch = rows()
    model = with_attention("llama", "torch_varlen")
    for attention in ("flash_attention_2", "torch_varlen"):
        model.config._attn_implementation = attention
        with pytest.raises(ValueError, match=rf"{attention} does not separate .* pass segments="):
            model(**batch)


def test_configuration_that_tells_enough_is_rejected_at_once() -> None:
    dropping = with_attention("llama", "torch_varlen", attention_dropout=0.1)
    with pytest.raises(ValueError, match="dropout"):
        dropping.train()(**rows(), segments=SEGMENTS)
    with pytest.raises(ValueError, match="needs chunked attention"):
        with_attention("llama", "torch_varlen", attention_chunk_size=8)


def test_segments_are_cumulative_lengths_when_some_are_empty() -> None:
    assert segments_of([3, 0, 4]).edges.tolist() == [0, 3, 7]
    assert segments_of([3, 0, 4]).longest == 4
    assert (segments_of([]).edges.tolist(), segments_of([]).longest) == ([0], 0)
