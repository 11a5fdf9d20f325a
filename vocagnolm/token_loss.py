"""Compute the loss of every token of a Hugging Face causal language model, without all its logits.

The logits of 4,096 tokens over a vocabulary of 152,064 take 2.3 GiB. So they are computed in tiles
and reduced to one number per token. The backward pass recomputes the logits of losses in use.
Every loss has the index of the token that it predicts, Eq. (1).

Shapes: B sequences, T positions, N = B * T rows, K rows of a tile, D hidden size, V vocabulary.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from vocagnolm.attention import (
    check_attention,
    in_its_precision,
    segments_of,
    takes_segments,
)
from vocagnolm.conventions import IGNORED_LABEL, NonFiniteLoss
from vocagnolm.fields import named
from vocagnolm.output_head import (
    Head,
    HeadGradients,
    last_hidden_state,
    log_softmax_,
    output_embeddings,
    read_head,
    rows_per_tile,
)

ModelT = TypeVar("ModelT", bound=nn.Module)


class _TokenLoss(torch.autograd.Function):
    """The cross-entropy of the head: forward for the rows that are read, backward for those used.

    With entropies, it also returns the entropies of the read rows' distributions, without gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        targets_N: Tensor,
        read_M: Tensor,
        weighted_tokens: int | None,
        with_entropies: bool,
    ) -> tuple[Tensor, ...]:
        # The head's weight and bias are separate arguments, because autograd does not see tensors
        # inside a tuple. It also checks that saved tensors are not changed in place before the
        # backward pass.
        ctx.save_for_backward(hidden_ND, targets_N, weight_VD, bias_V)
        # The backward pass reads the same weight, cast once.
        ctx.head = head = head.cast()
        ctx.weighted_tokens = weighted_tokens
        rows = rows_per_tile(len(read_M), head)
        tile_KV = head.tile(rows)
        # Rows that are not read stay NaN, so that their losses cannot pass for real ones.
        loss_N = hidden_ND.new_full((len(targets_N),), torch.nan, dtype=head.sum_dtype)
        entropy_N = torch.full_like(loss_N, torch.nan) if with_entropies else None
        # A row's loss is -log P(target):
        #   hidden [N, D]   |tile 0|tile 1|...   ->   logits [K, V] of one tile   ->   loss [N]
        # Each tile reuses the memory of the one before.
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # `torch.split` splits an empty tensor into one empty part, which the slice removes.
            for row_K in torch.split(read_M, rows)[: len(read_M)]:
                logits_KV = head.logits(hidden_ND[row_K], tile_KV)
                target_K1 = targets_N[row_K, None]
                if head.losses is not None and entropy_N is None:
                    loss_N[row_K] = head.losses(logits_KV, target_K1)
                    continue
                log_p_KV = log_softmax_(logits_KV)
                loss_N[row_K] = -log_p_KV.gather(-1, target_K1)[:, 0]
                # entr(p) is -p log p. At p = 0 it is 0, where the product would be NaN.
                if entropy_N is not None:
                    entropy_N[row_K] = torch.special.entr(log_p_KV.exp_()).sum(-1)
        if entropy_N is None:
            return (loss_N,)
        ctx.mark_non_differentiable(entropy_N)
        return loss_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        hidden_ND, targets_N, *_ = ctx.saved_tensors
        head = ctx.head
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden_ND, head)
        # Rows whose loss has no weight cost nothing here. Often these are most rows.
        used, grad = _used_rows(grad_N, ctx.weighted_tokens)
        rows = rows_per_tile(len(used), head)
        tile_KV = head.tile(rows)
        with torch.autocast(grad_N.device.type, enabled=False):
            for start in range(0, len(used), rows):
                row_K, grad_K = used[start : start + rows], grad[start : start + rows]
                hidden_KD = hidden_ND[row_K].to(head.dtype)
                logits_KV = head.logits(hidden_KD, tile_KV)
                # Compute the slope first, because the softmax overwrites the logits.
                slope_KV = head.slope(logits_KV)
                p_KV = torch.softmax(logits_KV, -1, out=logits_KV)
                target_K1 = targets_N[row_K, None]
                gradient_KV = head.gradient(p_KV, target_K1, grad_K[:, None], slope_KV)
                gradients.add(row_K, gradient_KV, hidden_KD)
        return *gradients.sums, *[None] * 5


def first_tokens(chosen: Tensor, count: int | None) -> Tensor:
    """Return the flat indices of the first chosen tokens, without a host-device sync."""
    # A stable sort puts the chosen tokens first and keeps their order. `nonzero` would wait for the
    # device to count them, and the caller already knows the count.
    return chosen.flatten().to(torch.uint8).argsort(descending=True, stable=True)[:count]


def _used_rows(grad_N: Tensor, weighted_tokens: int | None) -> tuple[Tensor, Tensor]:
    """Return the rows whose loss is used, int64, and the gradients of these losses."""
    used_N = grad_N != 0
    if weighted_tokens is None:
        # This is a host-device sync, to count them.
        rows = used_N.nonzero()[:, 0]
        return rows, grad_N[rows]
    # Take at least one row, so that a bound of 0 that is too low also shows.
    rows = first_tokens(used_N, max(weighted_tokens, 1))
    # The bound is tested on the device. If it is too low, gradients would be missing, so all become
    # NaN, which no run overlooks.
    return rows, grad_N[rows].masked_fill(used_N.sum() > weighted_tokens, torch.nan)


def add_token_losses(model: ModelT, device: torch.device | None = None) -> ModelT:
    """Make a causal language model return the loss of every token, Eq. (1). Returns the model.

    Afterwards, `model(input_ids=..., position_ids=..., labels=labels, token_losses=True)` returns
    float32 [B, T], in nats. Position t has the loss of token t. It is 0.0 if the label is -100, and
    at t = 0, which nothing predicts. Sums are in float32, or in float64 for a float64 model. The
    auxiliary loss of a mixture of experts is not added. The call takes these arguments, too:

        weighted_tokens  an upper bound on the tokens whose loss gets a gradient; it saves a GPU one
                         sync per backward pass; if it is too low, every gradient is NaN
        label_tokens     the number of labels: the head reads only these tokens; if it is too low,
                         the losses of the others are NaN
        with_entropies   also return the entropies of the distributions
        instead          a function whose result is returned instead of the losses; it gets the
                         hidden states [B, T, D], the token that each predicts [B, T], or -100, and
                         the head
        segments         for attention that does not separate documents by `position_ids`

    All other calls, such as `generate`, do not change. The new forward is set on this instance and
    runs inside the module's own call. So DDP, FSDP2, autocast and gradient checkpointing see an
    ordinary forward pass. Call this before they wrap the model. For a PEFT model, the wrapped model
    is changed. If the model is sharded by `fully_shard`, all processes must call this.

    Raises:
        ValueError: this is no causal language model of transformers, or a probe on `device` does
            not reproduce the losses of its own logits.
        NonFiniteLoss: the losses of the probe are NaN or infinite.
    """
    patched: Any = inner_model(model)
    output_embeddings(patched)
    bound, own_forward = patched.forward, type(patched).forward
    # A model that already returns token losses stays as it is. `unwrap` looks through wrappers
    # that were added to the forward since, for example by Accelerate.
    if "gives_token_losses" in vars(inspect.unwrap(bound)):
        return model
    check_attention(patched)

    def call(_: object, *args: object, **kwargs: object) -> object:
        return bound(*args, **kwargs)

    # Unbind it if possible, so that a deep copy runs its own layers, not the original's.
    original = bound.__func__ if isinstance(bound, MethodType) else call

    @functools.wraps(own_forward)
    def forward(
        self: PreTrainedModel, *args: Any, token_losses: bool = False, **kwargs: Any
    ) -> object:
        if token_losses:
            return _token_losses(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    # Keep the signature but not `__wrapped__`: accelerate's unwrap_model would follow it, and put
    # the model's own forward back.
    del forward.__wrapped__
    vars(forward).update(__signature__=inspect.signature(own_forward), gives_token_losses=True)
    patched.forward = MethodType(forward, patched)
    try:
        _check_head(patched, device)
    # A caller who catches the error gets the model as it was.
    except BaseException:
        patched.forward = bound
        raise
    return model


def inner_model(model: nn.Module) -> PreTrainedModel:
    """Return the model inside a PEFT model, and any other model itself."""
    return cast(PreTrainedModel, getattr(model, "get_base_model", lambda: model)())


def _token_losses(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    labels: Tensor,
    weighted_tokens: int | None = None,
    label_tokens: int | None = None,
    with_entropies: bool = False,
    instead: Callable[[Tensor, Tensor, Head], object] | None = None,
    **inputs: Any,
) -> object:
    hidden_BTD = last_hidden_state(model, input_ids=input_ids, **inputs)
    head = read_head(model, hidden_BTD)
    # Position t predicts token t + 1. The last position predicts nothing. It is scored and dropped,
    # which is cheaper than copying all hidden states without it.
    targets_BT = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).to(hidden_BTD.device)
    if instead is not None:
        return instead(hidden_BTD, targets_BT, head)
    ignored_BT = targets_BT == IGNORED_LABEL
    # Without a count, the mask is true everywhere and every row is read.
    read_M = first_tokens(~ignored_BT | (label_tokens is None), label_tokens)
    values: tuple[Tensor, ...] = _TokenLoss.apply(  # type: ignore[no-untyped-call]
        hidden_BTD.flatten(0, 1),
        head.weight_VD,
        head.bias_V,
        head,
        targets_BT.flatten().clamp(min=0),
        read_M,
        weighted_tokens,
        with_entropies,
    )
    tokens = []
    for value_N in values:
        # Fill instead of multiplying: an ignored row gets a gradient of exactly 0, even if its loss
        # is NaN.
        value_BT = value_N.view_as(targets_BT).masked_fill(ignored_BT, 0.0)
        tokens.append(by_predicted_token(value_BT).float())
    return tuple(tokens) if with_entropies else tokens[0]


def by_predicted_token(values_BT: Tensor) -> Tensor:
    """Move each value from the position that predicts a token to that token; the first gets 0."""
    #   position    0    1    2    3
    #   predicts    t1   t2   t3   -
    #   moved       0    v0   v1   v2
    return F.pad(values_BT[:, :-1], (1, 0))


# -- Probes --------------------------------------------------------------------------------------


@contextmanager
def probing(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Move a model to the kind of device where it will run, without gradients and dropout.

    Afterwards it moves back. If it is already on a device of this kind, it stays where it is.
    """
    inner = inner_model(model)
    # Modules may differ in their mode, for example a frozen part of a model in training, so
    # `model.train()` would not restore it.
    modes, home = [(module, module.training) for module in model.modules()], inner.device
    moves = device is not None and device.type != home.type
    model.eval()
    try:
        if moves:
            model.to(device)
        with torch.no_grad(), in_its_precision(inner):
            yield
    finally:
        if moves:
            model.to(home)
        for module, training in modes:
            module.training = training


def probe_ids(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Return fixed random ids inside the vocabulary, without using the global random state."""
    # Input and output embeddings may differ in size. Ids below both can be read and predicted.
    inner = inner_model(model)
    read, written = inner.get_input_embeddings().weight, output_embeddings(inner).weight
    assert isinstance(read, Tensor)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(min(len(read), len(written)), shape, generator=generator).to(read.device)


def require_finite(model: nn.Module, *tensors: Tensor) -> None:
    """Raise `NonFiniteLoss` if the losses of a probe are NaN or infinite."""
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        inner = inner_model(model)
        raise NonFiniteLoss(
            f"{type(model).__name__} ({inner.name_or_path or 'without a name'}) computes NaN or "
            f"infinite numbers on a short probe, in {inner.dtype}: check the checkpoint, or load "
            "it in bfloat16 or float32"
        )


def rounds_by_dtype(model: nn.Module, *dtypes: torch.dtype) -> bool:
    """Return whether a model is in full precision, so that results hardly depend on batch shapes.

    A quantized model may scale activations by row or by batch, whatever its dtype.
    """
    is_quantized = getattr(model, "is_quantized", False)
    return not is_quantized and set(dtypes) <= {torch.float32, torch.float64}


def _check_head(model: PreTrainedModel, device: torch.device | None) -> None:
    """Compare the losses with those of the model's own logits. An unknown head is an error."""
    with probing(model, device):
        ids = probe_ids(model, (2, 8))
        logits = model(input_ids=ids, use_cache=False).logits
        positions = torch.arange(8, device=ids.device).expand_as(ids)
        rows = {"input_ids": ids, "position_ids": positions, "labels": ids}
        losses = model(**rows, segments=segments_of([8, 8]), token_losses=True)
    require_finite(model, logits, losses)
    # A model on several devices may return them on different ones.
    logits, targets = logits.to(losses.device), ids[:, 1:].to(losses.device)
    # A head with more or fewer logits than rows is not supported.
    weight_VD = output_embeddings(model).weight
    reproduced = logits.shape[-1] == len(weight_VD)
    if reproduced:
        expected = F.cross_entropy(logits[:, :-1].float().mT, targets, reduction="none")
        # The tolerance is relative to the logits. An untrained model has such small logits that all
        # losses are near log(V), and an absolute tolerance would hide a wrong scale.
        relative = 1e-4 if rounds_by_dtype(model, logits.dtype, weight_VD.dtype) else 2e-2
        tolerance = 1e-5 + relative * logits.abs().max()
        reproduced = bool((losses[:, 1:] - expected).abs().max() <= tolerance)
    if not reproduced:
        attention = f" (or {named('attn_implementation')} {model.config._attn_implementation})"
        raise ValueError(
            f"the losses of {type(model).__name__} differ from those of its own logits: its output "
            f"head{attention if takes_segments(model) else ''} does something this project does "
            "not reproduce. Use another model, or add it to scale_and_cap in token_loss.py"
        )
