"""Rows of packed segments, as arguments of a model."""

from __future__ import annotations

from typing import Any

import torch
from architectures import VOCABULARY, build

from vocagnolm.attention import segments_of
from vocagnolm.token_loss import add_token_losses

LENGTHS = ((5, 9, 2), (16,), (1, 7, 6, 1, 1))


SEGMENTS = segments_of(length for row in LENGTHS for length in row)


def rows(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (len(LENGTHS), 16), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "token_losses": True}


def with_attention(name: str, attention: str, **overrides: Any) -> Any:
    """A tiny model with an attention that takes segments."""
    model = build(name, **overrides)
    model.set_attn_implementation(attention)
    return add_token_losses(model)
