"""The output head of a causal language model: from hidden states to logits, tile by tile.

The logits of all tokens are never held at once: a tile is made, reduced and dropped.

Shapes: N rows, K rows of a tile, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from vocagnolm.row_segments import RowSegments, segment_call, takes_segments

# Logits held at once (256 MiB and 32 MiB of float32): enough to keep the matrix unit busy, and far
# below a tenth of the full logits of one packed sequence.
TILE_LOGITS_CUDA = 2**26
TILE_LOGITS = 2**23


class Head(NamedTuple):
    """From hidden states to logits: cap * tanh(scale * (hidden @ weight.T + bias) / cap)."""

    scale: float
    cap: float | None
    dtype: torch.dtype  # of the factors of the matrix products

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of logits, losses and gradient sums: float32, or float64 for a float64 model."""
        return torch.promote_types(self.dtype, torch.float32)

    def matmul(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `a @ b` in `sum_dtype`, in `out` if given."""
        if self.dtype == self.sum_dtype:
            return torch.mm(a, b, out=out)
        if a.is_cuda:  # its kernel sums in float32, which are rounded without out_dtype
            return torch.mm(a, b, out_dtype=self.sum_dtype)
        product = torch.mm(a, b)
        return product.to(self.sum_dtype) if out is None else out.copy_(product)

    def tile(self, rows: int, weight_VD: Tensor) -> Tensor | None:
        """Return memory for the logits [rows, V] of one tile after the other."""
        # CUDA's allocator reuses memory; the system's would scatter the tiles.
        shape = (rows, len(weight_VD))
        return None if weight_VD.is_cuda else weight_VD.new_empty(shape, dtype=self.sum_dtype)

    def logits(
        self, hidden_KD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, tile_KV: Tensor | None
    ) -> Tensor:
        """Return logits [K, V] in `sum_dtype`, on which the caller may work in place."""
        out_KV = None if tile_KV is None else tile_KV[: len(hidden_KD)]
        logits_KV = self.matmul(hidden_KD.to(self.dtype), weight_VD.T, out_KV)
        if bias_V is not None:
            logits_KV += bias_V
        if self.scale != 1.0:
            logits_KV *= self.scale
        if self.cap is not None:
            logits_KV.div_(self.cap).tanh_().mul_(self.cap)
        return logits_KV

    def gradient(self, logits_KV: Tensor, targets_K: Tensor, grad_K: Tensor) -> Tensor:
        """Turn logits, in place, into the gradient of sum(grad * loss) at the matrix product."""
        # d loss / d logits = softmax(logits) - 1 at the target, times the slope of scale and cap.
        slope_KV = self.slope(logits_KV)
        gradient_KV = torch.softmax(logits_KV, -1, out=logits_KV)
        minus_one_K1 = gradient_KV.new_full((len(targets_K), 1), -1.0)
        gradient_KV.scatter_add_(-1, targets_K[:, None], minus_one_K1)
        gradient_KV *= grad_K[:, None] * self.scale
        return gradient_KV if slope_KV is None else gradient_KV.mul_(slope_KV)

    def slope(self, logits_KV: Tensor) -> Tensor | None:
        """Return the derivative of the soft cap, if there is one; the scale is not in it."""
        if self.cap is None:
            return None
        # (cap * tanh(x / cap))' = 1 - tanh(x / cap) ** 2
        return (logits_KV / self.cap).square_().neg_().add_(1.0)


def log_softmax_(logits_KV: Tensor) -> Tensor:
    """Turn logits, in place, into log-probabilities."""
    # PyTorch's kernels reduce a row before they write it, element by element. That they do so is
    # seen as every run begins: token losses are compared with those of the model's own logits.
    return torch.log_softmax(logits_KV, -1, out=logits_KV)


class HeadGradients:
    """Gradients at a head's hidden states, weight and bias, where needed, summed tile by tile."""

    def __init__(
        self,
        needed: Sequence[bool],
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
    ):
        self._head = head
        self._hidden_ND, self._weight_VD, self._bias_V = (
            torch.zeros_like(x, dtype=head.sum_dtype) if need and x is not None else None
            for need, x in zip(needed, (hidden_ND, weight_VD, bias_V), strict=True)
        )

    def add(self, row_K: Tensor, gradient_KV: Tensor, hidden_KD: Tensor, factor_VD: Tensor) -> None:
        """Add the part of a tile whose rows are in no other; its gradient in the dtype of sums."""
        if self._bias_V is not None:
            self._bias_V += gradient_KV.sum(0)
        gradient_KV = gradient_KV.to(self._head.dtype)
        if self._hidden_ND is not None:
            self._hidden_ND[row_K] = self._head.matmul(gradient_KV, factor_VD)
        # In place where the dtypes allow it, which spares a second [V, D] tensor.
        if self._weight_VD is not None and self._head.dtype == self._head.sum_dtype:
            self._weight_VD.addmm_(gradient_KV.T, hidden_KD)
        elif self._weight_VD is not None:
            self._weight_VD += self._head.matmul(gradient_KV.T, hidden_KD)

    def sums(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return all three in the dtype of sums, None if not needed; autograd rounds them."""
        return self._hidden_ND, self._weight_VD, self._bias_V


def rows_per_tile(rows: int, *weights_VD: Tensor) -> int:
    """Rows of a tile of logits over one vocabulary, or of tiles over several side by side."""
    logits = TILE_LOGITS_CUDA if weights_VD[0].is_cuda else TILE_LOGITS
    return max(1, min(rows, logits // sum(map(len, weights_VD))))


def read_head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor | None, Head]:
    """Return the weight [V, D] and bias [V] of a model's output head, whole, and the rest of it."""
    embeddings, kind = output_embeddings(model), hidden.device.type
    # Read here: the backward pass runs outside of autocast.
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    weight_VD, bias_V = (
        parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for parameter in (embeddings.weight, embeddings.bias)
    )
    return weight_VD, bias_V, Head(*scale_and_cap(model.config), dtype)


def last_hidden_state(
    model: PreTrainedModel, *args: Any, segments: RowSegments | None = None, **kwargs: Any
) -> Tensor:
    """Return the hidden states [B, T, D] that a model's output head reads.

    The other arguments are its base model's: `input_ids` and, for packed rows, `position_ids`, both
    [B, T]; with the segments for attention that cannot see packed rows in these.
    """
    rows_BT: Tensor | None = kwargs.get("input_ids")
    if takes_segments(model):
        kwargs = segment_call(model, segments, kwargs)
    # With a cache, transformers would let packed documents attend to each other.
    output = model.base_model(*args, **kwargs | {"use_cache": False, "return_dict": True})
    hidden = output.get("last_hidden_state") if isinstance(output, Mapping) else None
    if not isinstance(hidden, Tensor):
        raise ValueError(_unsupported(model, "its base model returns no last_hidden_state"))
    return hidden if rows_BT is None else hidden.view(*rows_BT.shape, -1)


def scale_and_cap(config: PreTrainedConfig) -> tuple[float, float | None]:
    """Return the factor and the soft cap that a model's own forward applies to its logits."""
    text_config = config.get_text_config()

    def number(name: str) -> float | None:
        value = getattr(text_config, name, None)
        return float(value) if isinstance(value, int | float) else None

    # Cohere, Falcon-H1, Muse; then Granite, MiniCPM; then Gemma, Griffin.
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= number(name) or 1.0
    scale /= number("logits_scaling") or 1.0
    return scale, number("final_logit_softcapping") or number("logits_soft_cap")


def is_quantized(model: nn.Module) -> bool:
    """Test whether a model's weights are quantized, which sets this attribute of it."""
    return bool(getattr(model, "is_quantized", False))


def output_embeddings(model: nn.Module) -> nn.Linear:
    """Return the linear layer that makes a model's logits; another, or none, is a ValueError."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(_unsupported(model, "it is no transformers.PreTrainedModel"))
    embeddings = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    # An adapter around the head is another kind too, and would be passed over.
    if not isinstance(embeddings, nn.Linear):
        kind = type(embeddings).__name__
        raise ValueError(_unsupported(model, f"its output embeddings are of type {kind}"))
    weight = embeddings.weight
    if type(weight) not in (nn.Parameter, Tensor, DTensor) or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise ValueError(_unsupported(model, f"its output embeddings are quantized ({kind})"))
    return embeddings


def _unsupported(model: nn.Module, found: str) -> str:
    return (
        f"token losses cannot be computed for {type(model).__name__}: {found}. Expected a causal "
        "language model of transformers, whose output embeddings are a torch.nn.Linear"
    )
