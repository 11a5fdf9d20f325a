"""Sum weighted token losses, Eq. (3), if each weight depends only on the token's own losses.

A tile of logits then gives the losses, their weights and the gradient of the weighted sum. It is
computed once, in the forward pass, and the backward pass only scales the gradient. This takes three
products with the head. If weights depend on other tokens, it takes four.

Shapes: B sequences, S positions, N = B * S rows, M tokens with a label, K of them in a tile, D
hidden size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.output_head import (
    SPREAD,
    Head,
    HeadGradients,
    log_softmax_,
    trained_rows_per_tile,
)
from vocagnolm.token_loss import by_predicted_token


class OwnWeights(NamedTuple):
    """The tokens with a label, as int64 indices in the flat batch, and a function of their weights.

    `weigh` gets the losses of some tokens, float32 [K], and their indices, and returns their
    weights, float32 [K]. It is called once for every token, outside of autograd. If there is a
    `gate`, it gets the log-probabilities [K, V], and its result multiplies the weights. The weights
    of the corpus [B, S], if it brings any, multiply only what is summed.
    """

    token_M: Tensor
    weigh: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor] | None = None
    corpus_BS: Tensor | None = None

    def losses(
        self, hidden_BSD: Tensor, targets_BS: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of weight x loss, and without a gradient the losses and weights [B, S].

        All are float32. This runs within the student's forward, as the `instead` of
        `add_token_losses`. Only one backward pass is possible: a second one is an error.
        """
        total, loss_BS, weight_BS = _WeightedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_BSD.flatten(0, 1),
            head.weight_VD,
            head.bias_V,
            head,
            targets_BS,
            self,
            torch.is_grad_enabled(),
        )
        return total, loss_BS, weight_BS


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        targets_BS: Tensor,
        tokens: OwnWeights,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The head's weight and bias are separate arguments, because autograd does not see tensors
        # inside a tuple.
        head, targets_N = head.cast(), targets_BS.flatten()
        # `needs_input_grad` ignores `torch.no_grad`, under which gradients would be computed for
        # nothing.
        needed = [need and with_gradient for need in ctx.needs_input_grad[:3]]
        gradients = HeadGradients(needed, hidden_ND, head)
        # A token with a label that is left out stays NaN, so its loss cannot pass for a real one.
        loss_N = hidden_ND.new_full((len(targets_N),), torch.nan, dtype=head.sum_dtype)
        loss_N.masked_fill_(targets_N == IGNORED_LABEL, 0.0)
        weight_N = torch.zeros_like(loss_N, dtype=torch.float32)
        rows = trained_rows_per_tile(len(tokens.token_M), head)
        tile_KV = head.tile(rows)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            # `torch.split` splits an empty tensor into one empty part, which the slice removes.
            for token_K in torch.split(tokens.token_M, rows)[: len(tokens.token_M)]:
                # The position before a token predicts it. The first token of a segment has no
                # label, so the position before is in the same row.
                row_K = token_K - 1
                target_K1 = targets_N[row_K, None]
                hidden_KD = hidden_ND[row_K].to(head.dtype)
                logits_KV = head.logits(hidden_KD, tile_KV)
                # Compute the slope first, because the next line overwrites the logits.
                slope_KV = head.slope(logits_KV) if any(needed) else None
                log_p_KV = log_softmax_(logits_KV)
                loss_K = -log_p_KV.gather(-1, target_K1)[:, 0]
                weight_K = tokens.weigh(loss_K.float(), token_K)
                if tokens.gate is not None:
                    weight_K = weight_K * tokens.gate(log_p_KV)
                loss_N[row_K], weight_N[row_K] = loss_K, weight_K
                if any(needed):
                    factor_K1 = SPREAD * weight_K[:, None]
                    if tokens.corpus_BS is not None:
                        factor_K1 = factor_K1 * tokens.corpus_BS.flatten()[token_K, None]
                    gradient_KV = head.gradient(log_p_KV.exp_(), target_K1, factor_K1, slope_KV)
                    gradients.add(row_K, gradient_KV, hidden_KD)
        ctx.save_for_backward(*gradients.sums)
        loss_BS = by_predicted_token(loss_N.view_as(targets_BS)).float()
        weight_BS = by_predicted_token(weight_N.view_as(targets_BS))
        ctx.mark_non_differentiable(loss_BS, weight_BS)
        summed_BS = weight_BS * loss_BS
        if tokens.corpus_BS is not None:
            summed_BS = summed_BS * tokens.corpus_BS
        return summed_BS.sum(), loss_BS, weight_BS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        # The gradient of the sum is one number. It scales the saved gradients in place, because a
        # second tensor of the head's size would be the largest of all. Autograd reports a second
        # backward pass, which would read the scaled gradients.
        factor = grad / SPREAD
        sums = (None if sums is None else sums.mul_(factor) for sums in ctx.saved_tensors)
        return *sums, *[None] * 4
