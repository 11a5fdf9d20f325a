"""Tiny models with an attention that takes segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash

from vocagnolm import attention as packed_attention  # registers torch_varlen
from vocagnolm.attention import RowSegments
from vocagnolm.token_loss import add_token_losses


def with_attention(name: str, attention: str, **overrides: Any) -> Any:
    model = build(name, **overrides)
    model.set_attn_implementation(attention)
    return add_token_losses(model)


@torch.library.custom_op("vocagnolm_tests::flash", mutates_args=())
def flash_kernel(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int) -> Tensor:
    """Compute what the package's kernel would, which a compiler does not look into either."""
    return packed_attention._reference((query, key, value), RowSegments(edges, longest), None)


@flash_kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, longest: int) -> Tensor:
    return torch.empty_like(query)


def flash_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, **_: object
) -> Tensor:
    return flash_kernel(q, k, v, cu_seqlens_q, max_seqlen_q)


def with_flash(monkeypatch: pytest.MonkeyPatch, **overrides: Any) -> Any:
    """A Llama whose attention is transformers' flash_attention_2, but for the kernel."""
    process = flash._lazy_define_process_function(flash_varlen)
    # transformers 5.19 and newer have a second function, for caches.
    has_two = hasattr(flash, "_process_with_kvcache_kwargs_fn")
    stand_ins = (None, flash_varlen, None, None, None), (process, None) if has_two else process
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda name: stand_ins)
    model = with_attention("llama", "sdpa", **overrides)
    model.config._attn_implementation = "flash_attention_2"  # looks for the package if it is set
    packed_attention.check_attention(model)
    return model
