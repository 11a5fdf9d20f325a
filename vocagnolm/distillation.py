"""Distances between the next-token distributions of student and teacher, Eq. (5) and Eq. (6).

Two distributions over whole vocabularies are held for one tile of tokens at a time, and once: all
tokens weigh alike, so losses, distances and the gradient of their sum are taken together, and
backward only multiplies it. The gradients are written out, so that exact zeros stay zero.

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

# Probabilities that are ordered at a time: as many as a CPU's cache holds, and as keep a GPU busy.
_ORDERED, _ORDERED_CUDA = 2**20, 2**24


class HeadStates(NamedTuple):
    """The hidden states and the output head that a model's distributions [M, V] are made from."""

    hidden_MD: Tensor
    head: Head


class Pairs(NamedTuple):
    """The pairs of tokens, int64 places in the flat batch, whose distributions are to be compared.

    The distribution of a token is made at the place before it:

        student   . a b c .    token_R           1 2 3      each at most once
        teacher   . x y .      teacher_token_R   1 1 2      x may stand for a and b
    """

    teacher: HeadStates
    token_R: Tensor
    teacher_token_R: Tensor
    alone_U: Tensor  # the student's label tokens without a counterpart
    distance: Distance
    factor: float

    def losses(
        self, student_BSD: Tensor, targets_BS: Tensor, head: Head
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is trained, the losses [B, S] and the distances [R], float32.

        It is called within the student's forward (`instead` of `add_token_losses`). What is
        trained is the sum of all losses, plus the factor times the sum of all distances; it alone
        has a gradient.
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
        # Weight and bias are the head's. They are arguments of their own because autograd sees
        # tensors among the arguments, and not those in a tuple.
        head, teacher = head.cast(), pairs.teacher.head.cast()
        # `needs_input_grad` does not know of `torch.no_grad`, under which gradients would be made
        # and thrown away.
        needed = [need and with_gradient for need in ctx.needs_input_grad[:3]]
        gradients = HeadGradients(needed, hidden_ND, head)
        loss_N = hidden_ND.new_zeros(len(targets_N), dtype=head.sum_dtype)
        distance_R = loss_N.new_empty(len(pairs.token_R))
        rows = rows_per_tile(len(loss_N), head, teacher)
        student_KV, teacher_KV = head.tile(rows), teacher.tile(rows)
        # The tiles of pairs come first, so that tile i has the distances from i * rows on. Tokens
        # without a counterpart follow, in tiles that have no teacher token.
        token_tiles = torch.split(pairs.token_R, rows)
        teacher_token_tiles = torch.split(pairs.teacher_token_R, rows)
        tiles = list(zip(token_tiles, teacher_token_tiles, strict=True))
        tiles += [(token_K, token_K[:0]) for token_K in torch.split(pairs.alone_U, rows)]
        # It takes log p, p and the teacher's log q, and gives the values [K] and their gradient at
        # the student's logits [K, V], which overwrite log p and log q.
        compare = _sorted_l1 if pairs.distance == "sorted_l1" else partial(_kl, kind=pairs.distance)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for index, (token_K, other_K) in enumerate(tiles):
                # The distribution of a token is made at the place before it. No first token of a
                # segment has a label, so the place before is in the same row.
                row_K = token_K - 1
                target_K1 = targets_N[row_K, None]
                other_KD = pairs.teacher.hidden_MD[other_K - 1]
                log_q_KV = log_softmax_(teacher.logits(other_KD, teacher_KV))
                hidden_KD = hidden_ND[row_K].to(head.dtype)
                logits_KV = head.logits(hidden_KD, student_KV)
                # The slope is read now, as the next line overwrites the logits.
                slope_KV = head.slope(logits_KV) if any(needed) else None
                log_p_KV = log_softmax_(logits_KV)
                loss_N[row_K] = -log_p_KV.gather(-1, target_K1)[:, 0]
                # d loss / d logits = p - 1 at the target
                gradient_KV = p_KV = log_p_KV.exp()
                if len(other_K):
                    # d (loss + factor * distance): the cross-entropy's p is added here, and its -1
                    # at the target by `Head.gradient`.
                    compared = compare(log_p_KV, p_KV, log_q_KV.to(p_KV.dtype))
                    distance_R[index * rows :][: len(other_K)], gradient_KV = compared
                    gradient_KV.mul_(pairs.factor).add_(p_KV)
                if any(needed):
                    gradient_KV = head.gradient(gradient_KV, target_K1, SPREAD, slope_KV)
                    gradients.add(row_K, gradient_KV, hidden_KD)
        # Rows without a label have no tile and a loss of 0, so they add nothing.
        total = (loss_N.sum() + pairs.factor * distance_R.sum()).float()
        loss_N = loss_N.float()
        distance_R = distance_R.float()
        ctx.save_for_backward(*gradients.sums)
        ctx.mark_non_differentiable(loss_N, distance_R)
        return total, loss_N, distance_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        # The gradient of the total is one number, by which the sums made in forward are scaled.
        factor = grad / SPREAD
        sums = (None if sums is None else sums * factor for sums in ctx.saved_tensors)
        return *sums, *[None] * 4


def _kl(log_p_KV: Tensor, p_KV: Tensor, log_q_KV: Tensor, kind: Distance) -> tuple[Tensor, Tensor]:
    """Compute the KL over the common tokens; those that one model alone has are dropped.

    Returns the values [K], and their gradient at the logits of p [K, V].
    """
    # The distribution of a model that has more tokens is normalised anew over the common ones.
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
        # log q is read no more, so its memory takes the product.
        value_K = torch.mul(p_KV, excess_KV, out=log_q_KV).sum(-1)
        gradient_KV = excess_KV.sub_(value_K[:, None]).mul_(p_KV)
    else:
        q_KV = log_q_KV.exp_()
        value_K = -excess_KV.mul_(q_KV).sum(-1)
        gradient_KV = torch.sub(p_KV, q_KV, out=q_KV)
    return value_K, F.pad(gradient_KV, (0, beyond)) if beyond else gradient_KV


def _sorted_l1(log_p_KV: Tensor, p_KV: Tensor, log_q_KV: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the L1 distance of the sorted probabilities, the fewer filled up with zeros.

    Returns the values [K], and their gradient at the logits of p [K, V].
    """
    student_words, teacher_words = p_KV.shape[-1], log_q_KV.shape[-1]
    # A few rows at a time: their order and the sort itself hold up to 44 bytes of a probability.
    ordered = _ORDERED if p_KV.is_cpu else _ORDERED_CUDA
    other_KV = _sort(log_q_KV.exp_(), max(1, ordered // teacher_words))
    # From the smallest up, so that the largest of both stand last:
    #   student   . . a b c           a b c
    #   teacher   x y z v w   or    x y z v      the x, without a partner, counts by itself
    value_K = other_KV[:, :-student_words].sum(-1)
    # log p is read no more, so its memory takes the signs.
    sign_KV = log_p_KV
    rows = max(1, ordered // student_words)
    for start in range(0, len(p_KV), rows):
        part = slice(start, start + rows)
        p_JV, sign_JV = p_KV[part], sign_KV[part]
        order_JV = _order(p_JV)
        excess_JV = p_JV.gather(-1, order_JV)
        excess_JV[:, max(0, student_words - teacher_words) :] -= other_KV[part, -student_words:]
        value_K[part].add_(excess_JV.abs().sum(-1))
        # Only the sign of the excess counts: it goes back to its token.
        sign_JV.scatter_(-1, order_JV, excess_JV.sign_())
    # d L1 / d logits of p = p * (sign - sum(p * sign))
    mean_K1 = (p_KV * sign_KV).sum(-1, keepdim=True)
    return value_K, sign_KV.sub_(mean_K1).mul_(p_KV)


def _order(p_KV: Tensor) -> Tensor:
    """Return the tokens of each row from the least likely up; on a CPU numpy is 7 times faster."""
    return torch.from_numpy(np.argsort(p_KV.numpy())) if p_KV.is_cpu else p_KV.argsort()


def _sort(q_KV: Tensor, rows: int) -> Tensor:
    """Sort each row in place; on a CPU numpy is 20 times faster."""
    if q_KV.is_cpu:
        q_KV.numpy().sort()
        return q_KV
    for q_JV in torch.split(q_KV, rows):
        q_JV.copy_(q_JV.sort().values)
    return q_KV
