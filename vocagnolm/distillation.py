"""Distances between the next-token distributions of student and teacher, Eq. (5) and Eq. (6).

Distributions over whole vocabularies exist for one tile of tokens at a time, and only once. All
tokens have the same weight, so the forward pass computes losses, distances and the gradient of
their sum together, and the backward pass only scales it. Gradients are written out, so that exact
zeros stay zero.

Shapes: N rows of the student, M of the teacher, R pairs, K of them in a tile, D hidden size, V
vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vocagnolm.method import Distance
from vocagnolm.output_head import (
    SPREAD,
    Head,
    HeadGradients,
    log_softmax_,
    rows_per_tile,
)
from vocagnolm.token_loss import by_predicted_token

# Probabilities that are sorted at a time: few enough for a CPU's cache, many enough for a GPU.
_ORDERED, _ORDERED_CUDA = 2**20, 2**24


class HeadStates(NamedTuple):
    """The hidden states and the output head that give a model's distributions [M, V]."""

    hidden_MD: Tensor
    head: Head


class Pairs(NamedTuple):
    """Pairs of tokens whose distributions are compared, as int64 indices in the flat batch.

    The position before a token predicts it:

        student   . a b c .    token_R           1 2 3      each at most once
        teacher   . x y .      teacher_token_R   1 1 2      x may stand for a and b
    """

    teacher: HeadStates
    token_R: Tensor
    teacher_token_R: Tensor
    alone_U: Tensor  # The student's label tokens without a partner.
    distance: Distance
    factor: float
    corpus_BS: Tensor | None = None  # The weights of the corpus, if it brings any.

    def losses(
        self, student_BSD: Tensor, targets_BS: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the training loss, the losses [B, S] and the distances [R], all float32.

        This runs within the student's forward, as the `instead` of `add_token_losses`. The training
        loss is the sum of all losses plus the factor times the sum of all distances. Only it has a
        gradient.
        """
        total, loss_N, distance_R = _Distilled.apply(  # type: ignore[no-untyped-call]
            student_BSD.flatten(0, 1),
            head.weight_VD,
            head.bias_V,
            head,
            targets_BS.flatten(),
            self,
            torch.is_grad_enabled(),
        )
        return total, by_predicted_token(loss_N.view_as(targets_BS)), distance_R


class _Distilled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        targets_N: Tensor,
        pairs: Pairs,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The head's weight and bias are separate arguments, because autograd does not see tensors
        # inside a tuple.
        head, teacher = head.cast(), pairs.teacher.head.cast()
        # `needs_input_grad` ignores `torch.no_grad`, under which gradients would be computed for
        # nothing.
        needed = [need and with_gradient for need in ctx.needs_input_grad[:3]]
        gradients = HeadGradients(needed, hidden_ND, head)
        loss_N = hidden_ND.new_zeros(len(targets_N), dtype=head.sum_dtype)
        distance_R = loss_N.new_empty(len(pairs.token_R))
        rows = rows_per_tile(len(loss_N), head, teacher)
        student_KV, teacher_KV = head.tile(rows), teacher.tile(rows)
        # Tiles of pairs come first, so tile i has the distances from i * rows on. Tokens without a
        # partner follow, in tiles without teacher tokens.
        token_tiles = torch.split(pairs.token_R, rows)
        teacher_token_tiles = torch.split(pairs.teacher_token_R, rows)
        tiles = list(zip(token_tiles, teacher_token_tiles, strict=True))
        tiles += [(token_K, token_K[:0]) for token_K in torch.split(pairs.alone_U, rows)]
        weight_N = torch.ones_like(loss_N)
        if pairs.corpus_BS is not None:
            # The position before a token predicts it, and has its loss.
            weight_N = pairs.corpus_BS.flatten().roll(-1).to(loss_N.dtype)
        # A distance takes log p, p and the teacher's log q. It returns the values [K] and the
        # gradient at the student's logits [K, V], and overwrites log p and log q.
        compare = _sorted_l1 if pairs.distance == "sorted_l1" else partial(_kl, kind=pairs.distance)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for index, (token_K, other_K) in enumerate(tiles):
                # The position before a token predicts it. The first token of a segment has no
                # label, so the position before is in the same row.
                row_K = token_K - 1
                target_K1 = targets_N[row_K, None]
                other_KD = pairs.teacher.hidden_MD[other_K - 1]
                log_q_KV = log_softmax_(teacher.logits(other_KD, teacher_KV))
                hidden_KD = hidden_ND[row_K].to(head.dtype)
                logits_KV = head.logits(hidden_KD, student_KV)
                # Compute the slope first, because the next line overwrites the logits.
                slope_KV = head.slope(logits_KV) if any(needed) else None
                log_p_KV = log_softmax_(logits_KV)
                loss_N[row_K] = -log_p_KV.gather(-1, target_K1)[:, 0]
                # d loss / d logits = p - 1 at the target
                gradient_KV = p_KV = log_p_KV.exp()
                if len(other_K):
                    # The gradient of loss + factor * distance: add the cross-entropy's p here.
                    # `Head.gradient` subtracts 1 at the target.
                    compared = compare(log_p_KV, p_KV, log_q_KV.to(p_KV.dtype))
                    distance_R[index * rows :][: len(other_K)], gradient_KV = compared
                    gradient_KV.mul_(pairs.factor).add_(p_KV)
                if any(needed):
                    factor_K1 = SPREAD * weight_N[row_K, None]
                    gradient_KV = head.gradient(gradient_KV, target_K1, factor_K1, slope_KV)
                    gradients.add(row_K, gradient_KV, hidden_KD)
        # Rows without a label are in no tile and have a loss of 0, so they add nothing.
        weighted_R = distance_R * weight_N[pairs.token_R - 1]
        total = ((loss_N * weight_N).sum() + pairs.factor * weighted_R.sum()).float()
        loss_N = loss_N.float()
        distance_R = distance_R.float()
        ctx.save_for_backward(*gradients.sums)
        ctx.mark_non_differentiable(loss_N, distance_R)
        return total, loss_N, distance_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        # The gradient of the total is one number. It scales the sums of the forward pass.
        factor = grad / SPREAD
        sums = (None if sums is None else sums * factor for sums in ctx.saved_tensors)
        return *sums, *[None] * 4


def _kl(log_p_KV: Tensor, p_KV: Tensor, log_q_KV: Tensor, kind: Distance) -> tuple[Tensor, Tensor]:
    """Compute the KL over the common tokens. Tokens of only one vocabulary are dropped.

    Returns the values [K] and the gradient at the logits of p [K, V].
    """
    # The larger distribution is renormalized over the common tokens.
    common = min(p_KV.shape[-1], log_q_KV.shape[-1])
    beyond = p_KV.shape[-1] - common
    if beyond:
        log_p_KV = log_p_KV[:, :common].log_softmax(-1)
        p_KV = log_p_KV.exp()
    if common < log_q_KV.shape[-1]:
        log_q_KV = log_q_KV[:, :common].log_softmax(-1)
    # The values, and their gradients at the logits of p:
    #   KL(p || q) = sum(p * log(p / q))     p * (log(p / q) - KL)     Eq. 5
    #   KL(q || p) = sum(q * log(q / p))     p - q
    excess_KV = log_p_KV.sub_(log_q_KV)
    if kind == "reverse_kl":
        # log q is not needed any more, so its memory is reused for the product.
        value_K = torch.mul(p_KV, excess_KV, out=log_q_KV).sum(-1)
        gradient_KV = excess_KV.sub_(value_K[:, None]).mul_(p_KV)
    else:
        q_KV = log_q_KV.exp_()
        value_K = -excess_KV.mul_(q_KV).sum(-1)
        gradient_KV = torch.sub(p_KV, q_KV, out=q_KV)
    return value_K, F.pad(gradient_KV, (0, beyond)) if beyond else gradient_KV


def _sorted_l1(log_p_KV: Tensor, p_KV: Tensor, log_q_KV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the L1 distance of the sorted probabilities. The shorter list is padded with zeros.

    Returns the values [K] and the gradient at the logits of p [K, V].
    """
    student_words, teacher_words = p_KV.shape[-1], log_q_KV.shape[-1]
    # Sort a few rows at a time, because the order and the sort need up to 44 bytes per probability.
    ordered = _ORDERED if p_KV.is_cpu else _ORDERED_CUDA
    other_KV = _sort(log_q_KV.exp_(), max(1, ordered // teacher_words))
    # From the smallest up, so that the largest of both stand last:
    #   student   . . a b c           a b c
    #   teacher   x y z v w   or    x y z v      the x, without a partner, counts by itself
    value_K = other_KV[:, :-student_words].sum(-1)
    # log p is not needed any more, so its memory is reused for the signs.
    sign_KV = log_p_KV
    rows = max(1, ordered // student_words)
    for start in range(0, len(p_KV), rows):
        part = slice(start, start + rows)
        p_JV, sign_JV = p_KV[part], sign_KV[part]
        order_JV = _order(p_JV)
        excess_JV = p_JV.gather(-1, order_JV)
        excess_JV[:, max(0, student_words - teacher_words) :] -= other_KV[part, -student_words:]
        value_K[part].add_(excess_JV.abs().sum(-1))
        # Only the sign of the difference counts. It goes back to its token.
        sign_JV.scatter_(-1, order_JV, excess_JV.sign_())
    # d L1 / d logits of p = p * (sign - sum(p * sign))
    mean_K1 = (p_KV * sign_KV).sum(-1, keepdim=True)
    return value_K, sign_KV.sub_(mean_K1).mul_(p_KV)


def _order(p_KV: Tensor) -> Tensor:
    """Return the order of each row's tokens by probability. On a CPU, numpy is 7 times faster."""
    return torch.from_numpy(np.argsort(p_KV.numpy())) if p_KV.is_cpu else p_KV.argsort()


def _sort(q_KV: Tensor, rows: int) -> Tensor:
    """Sort each row in place. On a CPU, numpy is 20 times faster."""
    if q_KV.is_cpu:
        q_KV.numpy().sort()
        return q_KV
    for q_JV in torch.split(q_KV, rows):
        q_JV.copy_(q_JV.sort().values)
    return q_KV
