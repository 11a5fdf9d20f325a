"""Tiny models with an attention that is told of segments."""

from __future__ import annotations

from typing import Any

from architectures import build

import vocagnolm.models  # noqa: F401 - registers torch_varlen
from vocagnolm.token_loss import add_token_losses


def with_attention(name: str, attention: str, **overrides: Any) -> Any:
    model = build(name, **overrides)
    model.set_attn_implementation(attention)
    return add_token_losses(model)
