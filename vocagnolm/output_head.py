"""Applies a model's output head to a tile of tokens at a time, so that full logits never exist.

Shapes: B sequences, T positions, N = B * T rows, K rows of a tile, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.attention import RowSegments, segment_call, takes_segments

# Logits that exist at once (256 MiB and 32 MiB of float32): enough to keep a matrix unit busy, and
# far below a tenth of the full logits of one packed sequence.
TILE_LOGITS_CUDA = 2**26
TILE_LOGITS = 2**23
# Numbers of the weight's gradient in 16 bits that are made at once on a CPU (2 MiB of float32).
CACHED = 2**19
# Gradients that are made in the forward pass are too large by this factor until the backward pass.
# Otherwise float16 would round small ones to zero before loss scaling could help. The factor is
# exact in every dtype.
SPREAD = 1024.0


class Head(NamedTuple):
    """Makes logits of hidden states: cap * tanh(scale * (hidden @ weight.T + bias) / cap)."""

    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    cap: float | None
    dtype: torch.dtype  # The dtype of the factors of matrix products.
    # If it is compiled: turns logits [K, V] and targets [K, 1] into losses [K].
    losses: Callable[[Tensor, Tensor], Tensor] | None = None

    def cast(self) -> "Head":
        """Return a head whose weight is cast once for all tiles."""
        return self._replace(weight_VD=self.weight_VD.to(self.dtype))

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of logits, losses and gradient sums: float32, or float64 if the model's is."""
        return torch.promote_types(self.dtype, torch.float32)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `a @ b` in `sum_dtype`, in `out` if given."""
        if self.dtype == self.sum_dtype:
            return torch.mm(a, b, out=out)
        # CUDA's kernel sums in float32, but without `out_dtype` it would round the sums. It
        # allocates its own result, so `out` is not used, and `tile` returns none.
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=self.sum_dtype)
        product = torch.mm(a, b)
        return product.to(self.sum_dtype) if out is None else out.copy_(product)

    def tile(self, rows: int) -> Tensor | None:
        """Return memory for the logits [rows, V] of one tile after the other."""
        # CUDA's allocator reuses the memory of the tile before. The system's allocator would
        # scatter the tiles, so on a CPU all of them use this memory.
        weight_VD = self.weight_VD
        shape = (rows, len(weight_VD))
        return None if weight_VD.is_cuda else weight_VD.new_empty(shape, dtype=self.sum_dtype)

    def logits(self, hidden_KD: Tensor, tile_KV: Tensor | None) -> Tensor:
        """Return logits [K, V] in `sum_dtype`. The caller may overwrite them."""
        out_KV = None if tile_KV is None else tile_KV[: len(hidden_KD)]
        logits_KV = self.matmul(hidden_KD.to(self.dtype), self.weight_VD.T, out_KV)
        if self.bias_V is not None:
            logits_KV += self.bias_V
        if self.scale != 1.0:
            logits_KV *= self.scale
        if self.cap is not None:
            logits_KV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_KV

    def slope(self, logits_KV: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap, if there is one; the scale is not in it."""
        if self.cap is None:
            return None
        # (cap * tanh(x / cap))' = 1 - tanh(x / cap) ** 2, and the logits are cap * tanh(x / cap).
        return (logits_KV / self.cap).square_().neg_().add_(1.0)

    def gradient(
        self, p_KV: Tensor, target_K1: Tensor, factor: Tensor | float, slope_KV: Tensor | None
    ) -> Tensor:
        """Turn probabilities, in place, into the gradient of factor * loss at the product."""
        # d loss / d logits = softmax(logits) - 1 at the target, times the slope of scale and cap.
        # Each row has one target, so its sum has one term and is the same in every run.
        p_KV.scatter_add_(-1, target_K1, p_KV.new_full(target_K1.shape, -1.0))
        p_KV *= factor * self.scale
        return p_KV if slope_KV is None else p_KV.mul_(slope_KV)


def log_softmax_(logits_KV: Tensor) -> Tensor:
    """Turn logits, in place, into log-probabilities."""
    # This works because PyTorch's kernels reduce a row before they overwrite it, element by
    # element. If a kernel did not, every run would notice at its start: `add_token_losses` compares
    # the losses with those of the model's own logits.
    return torch.log_softmax(logits_KV, -1, out=logits_KV)


class HeadGradients:
    """Sums the gradients of hidden states and of a head's weight and bias, tile by tile.

    `sums` are in the dtype of sums, and None if they are not needed. Autograd rounds them.
    """

    def __init__(self, needed: Sequence[bool], hidden_ND: Tensor, head: Head):
        self._head = head
        self.sums: list[Tensor | None] = []
        for need, tensor in zip(needed, (hidden_ND, head.weight_VD, head.bias_V), strict=True):
            if need and tensor is not None:
                self.sums.append(torch.zeros_like(tensor, dtype=head.sum_dtype))
            else:
                self.sums.append(None)

    def add(self, row_K: Tensor, gradient_KV: Tensor, hidden_KD: Tensor) -> None:
        """Add the part of a tile, whose gradient is in the dtype of sums.

        No row may be in two tiles, because the gradient of its hidden state is written, not added.
        """
        head, (hidden_ND, weight_VD, bias_V) = self._head, self.sums
        if bias_V is not None:
            bias_V += gradient_KV.sum(0)
        gradient_KV = gradient_KV.to(head.dtype)
        if hidden_ND is not None:
            hidden_ND[row_K] = head.matmul(gradient_KV, head.weight_VD)
        # Add in place if the dtypes allow it, which avoids a second [V, D] tensor.
        if weight_VD is not None and head.dtype == head.sum_dtype:
            weight_VD.addmm_(gradient_KV.T, hidden_KD)
        elif weight_VD is not None:
            # On a CPU, the product of a few words is cast and added while it is in the cache.
            words = len(weight_VD)
            if not weight_VD.is_cuda:
                words = max(1, CACHED // weight_VD.shape[1])
            parts = (torch.split(matrix, words) for matrix in (weight_VD, gradient_KV.T))
            for sum_WD, gradient_WK in zip(*parts, strict=True):
                sum_WD += head.matmul(gradient_WK, hidden_KD)


def rows_per_tile(rows: int, *heads: Head) -> int:
    """Return the rows of a tile of logits over one vocabulary, or of one tile for each head."""
    words = sum(len(head.weight_VD) for head in heads)
    is_cuda = heads[0].weight_VD.is_cuda
    return max(1, min(rows, tile_rows(words) if is_cuda else TILE_LOGITS // words))


def trained_rows_per_tile(rows: int, head: Head) -> int:
    """Return the rows of a tile whose losses and gradients are computed together."""
    # For each such tile, the whole weight is read twice, and its whole gradient is read and
    # written. On a CPU, a few rows would wait for that memory, so a tile has up to an eighth of the
    # weight's.
    least = 1 if head.weight_VD.is_cuda else head.weight_VD.shape[1] // 8
    return max(rows_per_tile(rows, head), min(rows, least))


def tile_rows(words: int) -> int:
    """Return the rows of a tile on a GPU.

    >>> tile_rows(32_000), tile_rows(152_064), tile_rows(10**6)
    (2048, 384, 67)
    """
    fit = TILE_LOGITS_CUDA // words
    # Matrix units compute 128 rows at a time.
    return fit - fit % 128 if fit > 128 else fit


def read_head(model: PreTrainedModel, hidden: Tensor) -> Head:
    """Return a model's output head with its whole weight."""
    embeddings, kind = output_embeddings(model), hidden.device.type
    # Read the dtype here, because the backward pass runs outside autocast.
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    # A sharded head gathers its weight in its forward, which never runs here.
    if isinstance(embeddings, FSDPModule):
        embeddings.unshard()
    bias_V = cast("Tensor | None", embeddings.bias)
    losses = getattr(model, "compiled_losses", None)
    return Head(embeddings.weight, bias_V, *scale_and_cap(model.config), dtype, losses)


def last_hidden_state(
    model: PreTrainedModel, *, segments: RowSegments | None = None, **inputs: Any
) -> Tensor:
    """Return the hidden states [B, T, D] that a model's output head reads.

    The inputs are those of the base model: `input_ids` and, for packed rows, `position_ids`, both
    [B, T]. Attention that cannot see packed rows in these gets the segments.
    """
    rows_BT = inputs["input_ids"]
    if takes_segments(model):
        inputs = segment_call(model, segments, inputs)
    # With a cache, transformers ignores restarts in the position ids, and would let packed
    # documents attend to each other.
    output = model.base_model(**inputs | {"use_cache": False, "return_dict": True})
    hidden = output.get("last_hidden_state") if isinstance(output, Mapping) else None
    if not isinstance(hidden, Tensor):
        raise ValueError(_unsupported(model, "its base model returns no last_hidden_state"))
    return hidden.view(*rows_BT.shape, -1)


def scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the factor and the soft cap that a model's own forward applies to its logits."""
    text_config = config.get_text_config()

    # Cohere, Falcon-H1 and Muse multiply, Granite and MiniCPM divide, Gemma and Griffin cap. The
    # probe of `add_token_losses` detects models that use a name that is missing here.
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(text_config, name, None) or 1.0
    scale /= getattr(text_config, "logits_scaling", None) or 1.0
    cap = getattr(text_config, "final_logit_softcapping", None)
    return scale, cap or getattr(text_config, "logits_soft_cap", None)


def output_embeddings(model: nn.Module) -> nn.Linear:
    """Return the linear layer that makes a model's logits.

    Raises:
        ValueError: another layer makes them, or none.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(_unsupported(model, "it is not a transformers.PreTrainedModel"))
    embeddings = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # An adapter around the head is not a linear layer either, and would be bypassed.
    if not isinstance(embeddings, nn.Linear):
        kind = type(embeddings).__name__
        raise ValueError(_unsupported(model, f"its output embeddings are of type {kind}"))
    weight = embeddings.weight
    # Subclasses of tensors, such as torchao's, may hold integers and still claim a float dtype, so
    # test the exact type.
    if type(weight) not in (nn.Parameter, Tensor, DTensor) or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise ValueError(_unsupported(model, f"its output embeddings are quantized ({kind})"))
    return embeddings


def _unsupported(model: nn.Module, reason: str) -> str:
    return (
        f"token losses cannot be computed for {type(model).__name__}: {reason}. Expected a causal "
        "language model of transformers, whose output embeddings are a torch.nn.Linear"
    )
