"""Attention that gets the document boundaries of packed rows instead of a mask.

The flash attention of `transformers` finds the segments of a one-row batch by `cu_seq_lens`. So
does `torch_varlen`, PyTorch's variable-length attention, which this module registers. That is why
all rows are concatenated.

    rows [2, 6]   a a a b b .   c c d d d d        . padding, a segment of its own
    as one [12]   a a a b b . c c d d d d
    edges         0     3   5 6   8       12       segment i holds [edges[i], edges[i + 1])

Shapes: B rows of T positions, N = B * T, H heads, D dimensions of a head.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from vocagnolm.fields import OptionError, named

TORCH_VARLEN = "torch_varlen"


class RowSegments(NamedTuple):
    """The segments of a batch whose rows are concatenated."""

    # int32 [segments + 1], from 0 to B * T; no segment reaches beyond its row.
    edges: Tensor
    # Tokens of the longest segment. The host knows the number, because the kernel's launch needs
    # it.
    longest: int


def segments_of(lengths: Iterable[int]) -> RowSegments:
    """Make segments of these lengths, in the order of the rows, without the empty ones."""
    # The padding of a full row has no tokens, so it is not a segment.
    lengths = [length for length in lengths if length]
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return RowSegments(edges, max(lengths, default=0))


def takes_segments(model: PreTrainedModel) -> bool:
    """Test whether a model's attention needs segments, which it cannot see in position ids.

    On a GPU such attention computes in 16 bits only.
    """
    return needs_segments(model.config._attn_implementation)


def needs_segments(attention: str | None) -> bool:
    """Test for torch_varlen, for flash attention, and for hub kernels whose names say so."""
    return attention is not None and (attention == TORCH_VARLEN or "flash" in attention)


def why_not_varlen(model: PreTrainedModel, *, trains: bool) -> str | None:
    """Return why a model cannot use torch_varlen on a GPU. The model may be on the meta device."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    # A configuration may hold the size of a window that is switched off.
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    # Flash attention reads the same arguments, so any model that supports it passes them to its
    # layers.
    if not (model._supports_attention_backend and model._supports_flash_attn):
        return "its attention cannot be exchanged"
    # A window as long as the context hides nothing.
    if window and window < (getattr(config, "max_position_embeddings", None) or math.inf):
        return f"it attends within a window of {window} tokens"
    if getattr(config, "attn_logit_softcapping", None):
        return "it has a soft cap of attention scores"
    if getattr(config, "attention_chunk_size", None):
        return "it attends in chunks"
    if not model._supports_sdpa:  # such as attention sinks
        return "it uses a custom attention"
    # Families of models use different names for it.
    for name in ("attention_dropout", "attn_pdrop"):
        if trains and getattr(config, name, None):
            return "it drops attention weights out"
    return None


def segment_call(
    model: PreTrainedModel, segments: RowSegments | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Concatenate the rows [B, T] of a base model's arguments to one, [1, N], and add its segments.

    Without segments, every row is one segment from position 0 on.
    """
    if segments is None:
        # Position ids may restart within a row. This attention would not see that, and documents
        # would silently attend to each other.
        if arguments.get("position_ids") is not None:
            raise ValueError(
                f"{_name(model)} does not separate packed documents by their position_ids: pass "
                "segments= (from PackedCollator) with the position_ids of packed rows"
            )
        return dict(arguments)
    assert arguments.get("attention_mask") is None, "the segments replace the mask"
    ids, positions = arguments["input_ids"], arguments["position_ids"]
    # The kernel reads the edges. Rotary embeddings read the positions, which restart.
    edges = segments.edges.to(ids.device)
    inputs = dict(arguments)
    inputs["input_ids"] = ids.reshape(1, -1)
    inputs["position_ids"] = positions.reshape(1, -1)
    inputs["cu_seq_lens_q"] = edges
    inputs["cu_seq_lens_k"] = edges
    inputs["max_length_q"] = segments.longest
    inputs["max_length_k"] = segments.longest
    # To make a mask, transformers would ask the device whether rows are packed, which is a
    # host-device sync. It accepts any mask of four dimensions as finished, so it gets an empty one,
    # unless the model has its own attention, which might read the mask.
    if _is_maskless(model.config._attn_implementation) and model._supports_attention_backend:
        inputs["attention_mask"] = ids.new_empty(1, 1, 0, 0)
    return inputs


def check_attention(model: PreTrainedModel) -> None:
    """Reject a model whose attention setting does not work for it."""
    if not takes_segments(model):
        return
    # Runs before any call with segments. It lets attention treat the empty mask of `segment_call`
    # as no mask.
    _make_maskless(model.config._attn_implementation)
    # `_attend` is not told of chunks, unlike of all else that its kernel cannot do.
    is_varlen = model.config._attn_implementation == TORCH_VARLEN
    if is_varlen and getattr(model.config.get_text_config(), "attention_chunk_size", None):
        raise ValueError(f"{_name(model)} needs chunked attention: use sdpa")


def in_its_precision(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Autocast to bfloat16 if a float32 model uses attention that works in 16 bits only."""
    kind = model.device.type
    needs_16_bits = kind == "cuda" and model.dtype == torch.float32 and takes_segments(model)
    # Trainer has already switched it on if it trains in 16 bits.
    if needs_16_bits and not torch.is_autocast_enabled(kind):
        return torch.autocast(kind, torch.bfloat16)
    return nullcontext()


def _name(model: PreTrainedModel) -> str:
    attention = model.config._attn_implementation
    return f"{type(model).__name__} with {named('attn_implementation')} {attention}"


# -- torch_varlen --------------------------------------------------------------------------------


_ATTENTIONS = AttentionInterface()  # type: ignore[no-untyped-call]
_MASKS = AttentionMaskInterface()  # type: ignore[no-untyped-call]
# Without this option, PyTorch 2.11 accepts no model with fewer key heads than query heads.
_HAS_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
_Rows = tuple[Tensor, Tensor, Tensor]  # query, key and value


def _attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend causally within segments, or else as `sdpa`. Returns [B, T, H, D] and no weights."""
    _check(module, options, max_length_q or 0)
    if cu_seq_lens_q is None or max_length_q is None:
        sdpa: Callable[..., tuple[Tensor, None]] = _ATTENTIONS["sdpa"]
        rows = (query_BHTD, key_BHTD, value_BHTD)
        return sdpa(module, *rows, attention_mask, scaling=scaling, **options)
    # All rows are concatenated, so B is 1, and the kernel takes [N, H, D] without it. Do not index:
    # the gradient of an index is copied into zeros, and that of `squeeze` is a view.
    kind = query_BHTD.device.type
    # Autocast does not know the kernel, and rotary embeddings return float32 under autocast. So
    # query, key and value are cast here.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value_BHTD.dtype
    query = query_BHTD.squeeze(0).transpose(0, 1).to(dtype)
    key = key_BHTD.squeeze(0).transpose(0, 1).to(dtype)
    value = value_BHTD.squeeze(0).transpose(0, 1).to(dtype)
    segments = RowSegments(cu_seq_lens_q, max_length_q)
    attend = _on_gpu if kind == "cuda" else _reference
    return attend((query, key, value), segments, scaling)[None], None


def _check(module: torch.nn.Module, options: Mapping[str, object], longest: int) -> None:
    """Reject a model whose attention needs more than the kernel's plain causal attention."""
    # transformers passes such extras as keyword arguments. Attention that ignores one computes
    # something else without any error.
    window = options.get("sliding_window")
    is_short = isinstance(window, int) and window != 0 and window < longest
    is_causal = options.get("is_causal") is not False and getattr(module, "is_causal", True)
    # What the kernel cannot do, and whether the model asks for it. A compiled layer takes lengths
    # as unknown, so no number becomes text before there is an error.
    extras = {
        "a sliding window of {} tokens, shorter than a segment of {}": is_short,
        "a soft cap of attention scores": options.get("softcap"),
        "attention sinks": options.get("s_aux") is not None,
        "a bias of positions": options.get("position_bias") is not None,
        "dropout of attention weights": options.get("dropout"),
        "attention that is not causal": not is_causal,
    }
    for extra, is_asked_for in extras.items():
        if is_asked_for:
            raise OptionError(
                "attn_implementation",
                f"{TORCH_VARLEN} does not support {extra.format(window, longest)}, which "
                f"{type(module).__name__} uses: use sdpa",
            )


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _reference(rows_NHD: _Rows, segments: RowSegments, scale: float | None) -> Tensor:
    """Attend segment by segment, on devices without the kernel."""
    # Each segment is a batch of one row, [1, H, n, D].
    lengths = segments.edges.diff().tolist()
    rows = [x.transpose(0, 1)[None] for x in rows_NHD]
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    queries, keys, values = (row.split_with_sizes(lengths, 2) for row in rows)
    parts = []
    for segment in zip(queries, keys, values, strict=True):
        parts.append(attend(*segment, **options))
    return torch.cat(parts, 2)[0].transpose(0, 1)


def _on_gpu(rows_NHD: _Rows, segments: RowSegments, scale: float | None) -> Tensor:
    dtype = rows_NHD[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise OptionError(
            "attn_implementation",
            f"{TORCH_VARLEN} computes in 16 bits on a GPU, found "
            f"{dtype}: use {named('bf16')} true and a {named('teacher_dtype')} of bfloat16, or "
            "use sdpa",
        )
    edges, longest = segments
    # A token's window is every earlier position, which -1 stands for, and no later one.
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}
    if _HAS_GROUPS:
        options["enable_gqa"] = True
    attend: Callable[..., Any] = varlen.varlen_attn
    out: Tensor = attend(*rows_NHD, edges, edges, longest, longest, **options)
    return out


def _flash(
    flash: Callable[..., tuple[Tensor, None]],
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend as transformers does, except that transformers reads the mask before the segments."""
    # Only `segment_call` passes an empty mask, so nothing changes for other callers in this
    # process.
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None
    return flash(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options)


def _is_maskless(attention: str) -> bool:
    return attention == TORCH_VARLEN or getattr(_ATTENTIONS.get(attention), "func", None) is _flash


def _make_maskless(attention: str) -> None:
    """Let flash attention of any version, or a hub kernel, work without a mask."""
    # The registry is global to the process. Do not wrap a function twice.
    if attention in _ATTENTIONS and not _is_maskless(attention):
        AttentionInterface.register(attention, partial(_flash, _ATTENTIONS[attention]))


AttentionInterface.register(TORCH_VARLEN, _attend)
# Without segments `_attend` calls `sdpa`, which needs sdpa's mask. With segments no mask is made,
# because `segment_call` passes one that counts as finished.
AttentionMaskInterface.register(TORCH_VARLEN, _MASKS["sdpa"])
