"""Places where documents end in packed rows, for attention that needs them instead of a mask.

The flash attention of `transformers`, and `torch_varlen` (`vocagnolm.models.attention`), find the
segments of a batch of one row by `cu_seq_lens`; so all rows are concatenated.

    rows [2, 6]   a a a b b .   c c d d d d        . padding, a segment of its own
    as one [12]   a a a b b . c c d d d d
    edges         0     3   5 6   8       12       segment i holds [edges[i], edges[i + 1])
"""

import inspect
import itertools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

TORCH_VARLEN = "torch_varlen"
USE_SDPA = "use --attn_implementation sdpa"
# Attentions that ignore a mask where there are segments; `models.attention` adds its own.
MASKLESS: set[str] = set()


class RowSegments(NamedTuple):
    """Places of a batch's segments, its rows concatenated."""

    # int32 [segments + 1], from 0 to B * T; no segment reaches beyond its row.
    edges: Tensor
    # Tokens of the longest one, known on the host: the kernel's launch needs it.
    longest: int


def segments_of(lengths: Iterable[int], device: torch.device | None = None) -> RowSegments:
    """Make segments of these lengths, in the order of the rows; empty ones are dropped."""
    lengths = [length for length in lengths if length]
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return RowSegments(edges, max(lengths, default=0))


def takes_segments(model: PreTrainedModel) -> bool:
    """Test whether a model's attention needs segments; other sees them in the position ids."""
    return needs_segments(model.config._attn_implementation)


def needs_segments(attention: str | None) -> bool:
    """Test it by the attention's name. On a GPU such attention computes in 16 bits only."""
    return attention is not None and (attention == TORCH_VARLEN or "flash" in attention)


def segment_call(
    model: PreTrainedModel, segments: RowSegments | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Lay the rows [B, T] of a base model's arguments out as one, [1, N], with its segments.

    Without segments, every row is one segment from position 0 on.
    """
    if segments is None:
        if arguments.get("position_ids") is not None:
            raise ValueError(
                f"{_name(model)} does not see in position_ids where packed documents end: pass "
                "segments= (PackedCollator gives them) with the position_ids of packed rows"
            )
        return dict(arguments)
    names = ("input_ids", "position_ids")
    if any(arguments.get(name) is None for name in names):
        raise ValueError("segments= needs input_ids=... and position_ids=..., both [B, T]")
    if arguments.get("attention_mask") is not None:
        raise ValueError("segments= and attention_mask= exclude each other: leave the mask out")
    # The kernel reads the edges, rotary embeddings the positions, which restart.
    ids = arguments["input_ids"]
    edges = segments.edges.to(ids.device)
    # To make a mask, transformers would ask the device whether rows are packed: a host-device sync.
    # One of four dimensions it takes as made. A model with attention of its own might read it.
    is_registered = model._supports_attention_backend
    is_maskless = is_registered and model.config._attn_implementation in MASKLESS
    mask = {"attention_mask": ids.new_empty(1, 1, 0, 0)} if is_maskless else {}
    return {
        **arguments,
        **mask,
        **{name: arguments[name].reshape(1, -1) for name in names},
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), edges),
        **dict.fromkeys(("max_length_q", "max_length_k"), segments.longest),
    }


def check_attention(model: PreTrainedModel) -> None:
    """Reject a model that its attention cannot serve."""
    if not takes_segments(model):
        return
    # A model without **kwargs loses the edges on their way to the attention.
    parameters = inspect.signature(model.base_model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"{_name(model)} does not take the ends of documents: {USE_SDPA}")
    if model.config._attn_implementation != TORCH_VARLEN:
        return
    # Names that differ between families of models.
    names = ("attention_chunk_size", "attention_dropout", "attn_pdrop")
    config = model.config.get_text_config()
    chunk, *dropouts = (getattr(config, name, None) or 0.0 for name in names)
    if chunk:
        raise ValueError(f"{_name(model)} cannot attend in chunks, as it has to: {USE_SDPA}")
    # A frozen model drops nothing.
    if any(dropouts) and any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{_name(model)} cannot drop attention weights out, as its dropout of {max(dropouts)} "
            f"asks: set it to 0 in the model's configuration, or {USE_SDPA}"
        )


def in_its_precision(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where a model in float32 has attention for 16 bits only."""
    kind = model.device.type
    # Trainer has it on already, where it trains in 16 bits.
    if kind != "cuda" or model.dtype != torch.float32 or torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.bfloat16) if takes_segments(model) else nullcontext()


def _name(model: PreTrainedModel) -> str:
    attention = model.config._attn_implementation
    return f"{type(model).__name__} with --attn_implementation {attention}"
