"""Attention that reads where the segments of packed rows end, registered with `transformers`.

`torch_varlen` is PyTorch's variable-length attention, without a mask and without a package beside
PyTorch. The flash attentions of `transformers` are registered again, without what slows them down.

Shapes: B rows of T positions, N = B * T, H heads, D dimensions of a head.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from vocagnolm.row_segments import MASKLESS, TORCH_VARLEN, USE_SDPA, RowSegments

_ATTENTIONS = AttentionInterface()  # type: ignore[no-untyped-call]
_MASKS = AttentionMaskInterface()  # type: ignore[no-untyped-call]
# Query, key and value.
_Rows = tuple[Tensor, Tensor, Tensor]


class _DeferredMask:
    """The mask of `sdpa`, made on demand: with segments there is none."""

    def __init__(self, **arguments: object):
        self._arguments = arguments

    @cached_property
    def mask(self) -> Tensor | None:
        make: Callable[..., Tensor | None] = _MASKS["sdpa"]
        return make(**self._arguments)


def _attend(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: _DeferredMask | Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend causally within segments, or as `sdpa` without; return [B, T, H, D] and no weights."""
    _check(module, options, max_length_q or 0)
    if cu_seq_lens_q is None or max_length_q is None:
        mask = attention_mask.mask if isinstance(attention_mask, _DeferredMask) else attention_mask
        sdpa: Callable[..., tuple[Tensor, None]] = _ATTENTIONS["sdpa"]
        return sdpa(module, query_BHTD, key_BHTD, value_BHTD, mask, scaling=scaling, **options)
    # All rows are concatenated: B is 1.
    kind = query_BHTD.device.type
    # The kernel is unknown to autocast, under which rotary embeddings leave float32 behind.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value_BHTD.dtype
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query_BHTD, key_BHTD, value_BHTD))
    segments = RowSegments(cu_seq_lens_q, max_length_q)
    attend = _on_gpu if kind == "cuda" else _reference
    return attend((query, key, value), segments, scaling)[None], None


def _check(module: torch.nn.Module, options: Mapping[str, object], longest: int) -> None:
    """Reject a model whose attention is more than the kernel's: causal, without extras."""
    window = options.get("sliding_window")
    is_short = isinstance(window, int) and window != 0 and window < longest
    # By name, true where the model asks for it.
    asked = {
        f"a sliding window of {window} tokens, shorter than a segment of {longest}": is_short,
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
                f"{type(module).__name__} asks for: {USE_SDPA}"
            )


@torch.compiler.disable(recursive=True)  # type: ignore[no-untyped-call, untyped-decorator]
def _reference(rows_NHD: _Rows, segments: RowSegments, scale: float | None) -> Tensor:
    """Segment by segment, for devices without the kernel."""
    # Each segment is a batch of one row, [1, H, n, D].
    lengths = segments.edges.diff().tolist()
    rows = [x.transpose(0, 1)[None] for x in rows_NHD]
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    attend: Callable[..., Tensor] = F.scaled_dot_product_attention
    segments_of_rows = zip(*(row.split_with_sizes(lengths, 2) for row in rows), strict=True)
    parts = [attend(*segment, **options) for segment in segments_of_rows]
    return torch.cat(parts, 2)[0].transpose(0, 1)


def _on_gpu(rows_NHD: _Rows, segments: RowSegments, scale: float | None) -> Tensor:
    if (dtype := rows_NHD[0].dtype) not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"--attn_implementation {TORCH_VARLEN} computes in 16 bits on a GPU, found "
            f"{dtype}: use --bf16 true and a --teacher_dtype of bfloat16, or {USE_SDPA}"
        )
    has_groups = _has_groups()
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = segments
    # The window: all positions before, none behind.
    attend = partial(varlen_attn, scale=scale, window_size=(-1, 0))
    # PyTorch 2.11 takes fewer heads of keys than of queries without the option.
    if has_groups:
        attend = partial(attend, enable_gqa=True)
    out = attend(*rows_NHD, edges, edges, longest, longest)
    assert isinstance(out, Tensor)
    return out


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_groups() -> bool:
    """Test whether the kernel of PyTorch has an option for groups of queries."""
    return "enable_gqa" in _kernel_options()


@cache
def _kernel_options() -> Collection[str]:
    """Return the parameters of PyTorch's kernel."""
    from torch.nn.attention.varlen import varlen_attn

    return inspect.signature(varlen_attn).parameters


def _flash(
    flash: Callable[..., tuple[Tensor, None]],
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attend as transformers does, which looks at a mask before it looks at segments."""
    rows = (query_BHTD, key_BHTD, value_BHTD)
    if options.get("cu_seq_lens_q") is None:
        return flash(module, *rows, attention_mask, **options)
    return flash(module, *rows, None, **options)


for _name in ("flash_attention_2", "flash_attention_3"):
    AttentionInterface.register(_name, partial(_flash, _ATTENTIONS[_name]))
    MASKLESS.add(_name)
MASKLESS.add(TORCH_VARLEN)
AttentionInterface.register(TORCH_VARLEN, _attend)
AttentionMaskInterface.register(TORCH_VARLEN, _DeferredMask)
