"""Attention that is told where the segments of packed rows end, instead of being given a mask.

The flash attention of `transformers` isolates segments only in a batch of one row, where they are
told apart by `cu_seq_lens`; so all rows are laid out as one. The same way serves `torch_varlen`,
registered here: PyTorch's own variable-length attention, which needs no further package.

Shapes: B rows of T positions, N = B * T, H heads, D dimensions of a head.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

TORCH_VARLEN = "torch_varlen"
_INSTEAD = "use --attn_implementation sdpa"


class RowSegments(NamedTuple):
    """Where the segments of a batch lie, its rows laid out one behind the other.

    Attributes:
        edges: int32 [segments + 1], from 0 to B * T; no segment reaches beyond its row.
        longest: tokens of the longest one, known on the host.
    """

    edges: Tensor
    longest: int


def segments_of(lengths: Iterable[int], device: torch.device | None = None) -> RowSegments:
    """Segments of these lengths, in tokens and in the order of the rows; empty ones are dropped."""
    lengths = [length for length in lengths if length]
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return RowSegments(edges, max(lengths, default=0))


def student_segments(batch: Mapping[str, Any]) -> RowSegments | None:
    """Segments of the student's rows, if a batch says (`vocagnolm.packing.PackedCollator`)."""
    if "segment_edges" not in batch:
        return None
    return RowSegments(batch["segment_edges"], batch["longest_segment"])


def teacher_segments(batch: Mapping[str, Any]) -> list[RowSegments | None]:
    """Segments of every teacher's rows, if a batch says."""
    if "teacher_segment_edges" not in batch:
        return [None] * len(batch["teacher_widths"])
    found = (batch["teacher_segment_edges"], batch["teacher_longest_segment"])
    return [RowSegments(*segments) for segments in zip(*found, strict=True)]


def takes_segments(model: Any) -> bool:
    """Whether a model's attention is told of segments; others see them in the position ids."""
    return is_told_of_segments(getattr(model.config, "_attn_implementation", None))


def is_told_of_segments(attention: str | None) -> bool:
    """The same by its name. On a GPU such attention computes in 16 bits only."""
    return attention is not None and (attention == TORCH_VARLEN or "flash" in attention)


def segment_call(
    model: Any, segments: RowSegments | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a base model that lay the rows [B, T] out as one, [1, N], with its segments.

    Args:
        model: whose attention takes segments.
        segments: of the rows. None where every row is one segment from position 0 on.
        arguments: `input_ids`, and with segments `position_ids`, both [B, T].

    Raises:
        ValueError: something is missing, or cannot be laid out.
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
    edges = segments.edges.to(arguments["input_ids"].device)
    return {
        **arguments,
        **{name: arguments[name].reshape(1, -1) for name in names},
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": segments.longest,
        "max_length_k": segments.longest,
    }


def check_attention(model: Any, device: torch.device | None = None) -> None:
    """Refuse a model that the attention it is given cannot serve, as far as its kind tells.

    Args:
        model: a causal language model.
        device: where it will run, if it is not there yet.

    Raises:
        ValueError: it cannot.
    """
    if not takes_segments(model):
        return
    parameters = inspect.signature(model.base_model.forward).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ValueError(f"{_name(model)} cannot be told where documents end: {_INSTEAD}")
    if model.config._attn_implementation != TORCH_VARLEN:
        return
    config = model.config.get_text_config()
    if getattr(config, "attention_chunk_size", None):
        raise ValueError(f"{_name(model)} cannot attend in chunks, as it has to: {_INSTEAD}")
    names = ("attention_dropout", "attn_pdrop")
    dropout = max(getattr(config, name, None) or 0.0 for name in names)
    if dropout and any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{_name(model)} cannot drop attention weights out, as its dropout of {dropout} asks: "
            f"set it to 0 in the model's configuration, or {_INSTEAD}"
        )
    if (device or model.device).type == "cuda":
        _check_kernel()


def in_its_precision(model: Any) -> AbstractContextManager[Any]:
    """Autocast to bfloat16 where a model in float32 has attention for 16 bits only."""
    if not (takes_segments(model) and model.device.type == "cuda" and model.dtype == torch.float32):
        return nullcontext()
    if torch.is_autocast_enabled(model.device.type):
        return nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


def _name(model: Any) -> str:
    attention = model.config._attn_implementation
    return f"{type(model).__name__} with --attn_implementation {attention}"


class _DeferredMask:
    """The mask of `sdpa`, made when it is asked for: with segments it never is."""

    def __init__(self, **arguments: Any):
        self._arguments = arguments

    @cached_property
    def mask(self) -> Tensor | None:
        mask: Tensor | None = _interface("sdpa", AttentionMaskInterface)(**self._arguments)
        return mask


def _interface(name: str, interface: Any) -> Callable[..., Any]:
    """What `transformers` registered under a name."""
    function: Callable[..., Any] = interface()[name]
    return function


def _attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: _DeferredMask | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments; without segments, what `sdpa` does.

    Returns:
        [B, T, H, D], and no weights.

    Raises:
        ValueError: the model asks for what the kernel cannot do.
    """
    _refuse(module, options, max_length_q or 0)
    if cu_seq_lens_q is None or max_length_q is None:
        mask = None if attention_mask is None else attention_mask.mask
        sdpa: Callable[..., tuple[Tensor, None]] = _interface("sdpa", AttentionInterface)
        return sdpa(module, query_BHTD, key_BHTD, value_BHTD, mask, scaling=scaling, **options)
    kind = query_BHTD.device.type
    # The kernel is unknown to autocast, under which rotary embeddings leave float32 behind.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value_BHTD.dtype
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query_BHTD, key_BHTD, value_BHTD))
    segments = RowSegments(cu_seq_lens_q, max_length_q)
    attend = _on_gpu if kind == "cuda" else _reference
    return attend(query, key, value, segments, scaling)[None], None


def _refuse(module: torch.nn.Module, options: Mapping[str, Any], longest: int) -> None:
    window = options.get("sliding_window")
    asked = {
        f"a sliding window of {window} tokens, shorter than a segment of {longest}": window
        and window < longest,
        "a soft cap of attention scores": options.get("softcap"),
        "attention sinks": options.get("s_aux") is not None,
        "a bias of positions": options.get("position_bias") is not None,
        "dropout of attention weights": options.get("dropout"),
        "attention that is not causal": options.get("is_causal") is False
        or not getattr(module, "is_causal", True),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(
                f"--attn_implementation {TORCH_VARLEN} cannot do {what}, which "
                f"{type(module).__name__} asks for: {_INSTEAD}"
            )


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _reference(
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    segments: RowSegments,
    scaling: float | None,
) -> Tensor:
    """Segment by segment, for devices without the kernel."""
    lengths = segments.edges.diff().tolist()
    parts = [
        F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
        for query, key, value in zip(
            query_NHD.split_with_sizes(lengths),
            key_NHD.split_with_sizes(lengths),
            value_NHD.split_with_sizes(lengths),
            strict=True,
        )
    ]
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def _on_gpu(
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    segments: RowSegments,
    scaling: float | None,
) -> Tensor:
    if query_NHD.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--attn_implementation {TORCH_VARLEN} computes in 16 bits on a GPU, found "
            f"{query_NHD.dtype}: use --bf16 true and a --teacher_dtype of bfloat16, or {_INSTEAD}"
        )
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = segments
    kernel: Callable[..., Any] = varlen_attn
    out: Tensor = kernel(
        *(query_NHD, key_NHD, value_NHD, edges, edges, longest, longest),
        scale=scaling,
        window_size=(-1, 0),  # all positions before, none behind
        enable_gqa=True,
    )
    return out


def _check_kernel() -> None:
    """Refuse a PyTorch whose variable-length attention is another one, or is not there."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        found: set[str] = set()
    else:
        found = set(inspect.signature(varlen_attn).parameters)
    if not {"scale", "window_size", "enable_gqa"} <= found:
        raise ValueError(
            f"--attn_implementation {TORCH_VARLEN} needs torch >= 2.12, found {torch.__version__}: "
            f"upgrade it, or {_INSTEAD}"
        )


AttentionInterface.register(TORCH_VARLEN, _attend)
AttentionMaskInterface.register(TORCH_VARLEN, _DeferredMask)
