"""Distances between the distributions of student and teacher over words: Eq. (5), Eq. (6), entropy.

Two distributions over all words are held for one tile of tokens at a time, and once: all distances
weigh alike, so the gradient of their sum is taken with them, and backward only multiplies it. The
gradients are written out, so that exact zeros stay zero.

Shapes: N rows of the student, M of the teacher, R pairs, K of them in a tile, D hidden, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vocagnolm.output_head import Head, HeadGradients, rows_per_tile

# KL(p_S || p_T), Eq. (5), and KL(p_T || p_S), over the words that student and teacher share; L1 of
# the probabilities sorted by size, the Wasserstein distance of ULD, Eq. (6), whatever the words.
Distance = Literal["reverse_kl", "forward_kl", "sorted_l1"]
# Gradients are as many times too large until backward: float16 would round small ones to zero
# before its loss scaling, which comes later, could help. Exact in every dtype.
_SPREAD = 1024.0


class HeadStates(NamedTuple):
    """Hidden states and output head, from which a model's distributions [M, V] are made."""

    hidden_MD: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    head: Head

    def cast(self) -> HeadStates:
        """With the weight in the dtype of the products, once for all tiles."""
        return self._replace(weight_VD=self.weight_VD.to(self.head.dtype))

    def logits(self, row_K: Tensor | slice) -> Tensor:
        """The logits [K, V] of some rows."""
        return self.head.logits(self.hidden_MD[row_K], self.weight_VD, self.bias_V, None)


class Pairs(NamedTuple):
    """Pairs of tokens, int64 places in the flat batch, whose distributions are to be compared.

    Their distributions are those of the places before:

        student   . a b c .    token_R           1 2 3      each at most once
        teacher   . x y .      teacher_token_R   1 1 2      x may stand for a and b
    """

    teacher: HeadStates
    token_R: Tensor
    teacher_token_R: Tensor

    def distances(
        self,
        distance: Distance,
        student_BSD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the distances, and all of them without gradient, float32 [R].

        Within the student's forward (see `token_loss.Also`); the gradient of the sum flows to the
        student's hidden states and output head only.
        """
        student = HeadStates(student_BSD.flatten(0, 1), weight_VD, bias_V, head)
        apply: Any = _Distances.apply
        sum_and_all: tuple[Tensor, Tensor] = apply(
            *student, self, distance, torch.is_grad_enabled()
        )
        return sum_and_all


def first_tokens(chosen_BS: Tensor, count: int) -> Tensor:
    """Return the places of the chosen tokens in the flat batch, int64; the host has their count."""
    return chosen_BS.flatten().to(torch.uint8).argsort(descending=True, stable=True)[:count]


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        head: Head,
        pairs: Pairs,
        distance: Distance,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        student, teacher = (
            HeadStates(hidden_ND, weight_VD, bias_V, head).cast(),
            pairs.teacher.cast(),
        )
        needed = [need and with_gradient for need in ctx.needs_input_grad[:3]]
        gradients = HeadGradients(needed, hidden_ND, weight_VD, bias_V, head)
        count = len(pairs.token_R)
        value_R = torch.empty(count, dtype=head.sum_dtype, device=hidden_ND.device)
        rows = rows_per_tile(count, student.weight_VD, teacher.weight_VD)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for tile in (slice(start, start + rows) for start in range(0, count, rows)):
                row_K = pairs.token_R[tile] - 1
                logits_KV = student.logits(row_K)
                slope_KV = head.slope(logits_KV) if any(needed) else None
                other_KV = teacher.logits(pairs.teacher_token_R[tile] - 1)
                value_R[tile], gradient = _DISTANCES[distance](logits_KV, other_KV)
                if any(needed):
                    gradient_KV = gradient().mul_(_SPREAD * head.scale)
                    if slope_KV is not None:
                        gradient_KV *= slope_KV
                    hidden_KD = hidden_ND[row_K].to(head.dtype)
                    gradients.add(row_K, gradient_KV, hidden_KD, student.weight_VD)
        ctx.save_for_backward(*gradients.sums())
        all_R = value_R.float()
        ctx.mark_non_differentiable(all_R)
        return value_R.sum().float(), all_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
        factor = grad / _SPREAD
        sums = (None if sums is None else sums * factor for sums in ctx.saved_tensors)
        return *sums, None, None, None, None


# The values [K], and what makes their gradient at the student's logits [K, V] once it is wanted.
_Value = tuple[Tensor, Callable[[], Tensor]]


def _kl(student_KV: Tensor, teacher_KV: Tensor, *, reverse: bool) -> _Value:
    """KL over the common words; those that one model alone has are dropped."""
    words = min(student_KV.shape[-1], teacher_KV.shape[-1])
    beyond = student_KV.shape[-1] - words
    log_p_KV = student_KV[:, :words].log_softmax(-1)
    log_q_KV = teacher_KV[:, :words].to(log_p_KV.dtype).log_softmax(-1)
    p_KV = log_p_KV.exp()
    if not reverse:
        q_KV = log_q_KV.exp()
        value_K = (q_KV * (log_q_KV - log_p_KV)).sum(-1)
        # d KL(q || p) / d logits of p = p - q
        return value_K, lambda: F.pad(p_KV - q_KV, (0, beyond))
    # d KL(p || q) / d logits of p = p * (log(p / q) - KL)
    excess_KV = log_p_KV.sub_(log_q_KV)
    value_K = (p_KV * excess_KV).sum(-1)
    return value_K, lambda: F.pad(p_KV * (excess_KV - value_K[:, None]), (0, beyond))


def _sorted_l1(student_KV: Tensor, teacher_KV: Tensor) -> _Value:
    """L1 distance of the sorted probabilities, the fewer filled up with zeros."""
    p_KV = student_KV.softmax(-1)
    # Only the excess of each place in the order counts: its sign goes back to its word.
    sorted_KV, order_KV = _sort(p_KV)
    other_KV = _sort_values(teacher_KV.to(p_KV.dtype).softmax(-1))
    words, others = p_KV.shape[-1], other_KV.shape[-1]
    # From the smallest up, so that the largest of both stand last:
    #   student   . . a b c         or   a b c
    #   teacher   x y z v w            x y z v      the x, without a partner, counts by itself
    excess_KV = sorted_KV.sub_(F.pad(other_KV[:, -words:], (max(0, words - others), 0)))
    value_K = excess_KV.abs().sum(-1) + other_KV[:, :-words].sum(-1)

    def gradient() -> Tensor:
        sign_KV = torch.empty_like(p_KV).scatter_(-1, order_KV, excess_KV.sign_())
        mean_K1 = (p_KV * sign_KV).sum(-1, keepdim=True)
        return sign_KV.sub_(mean_K1).mul_(p_KV)

    return value_K, gradient


def _sort(p_KV: Tensor) -> tuple[Tensor, Tensor]:
    """Sort rows, and name the word of each place; on a CPU numpy does it 7 times faster."""
    if p_KV.device.type != "cpu":
        return p_KV.sort(dim=-1)
    order_KV = torch.from_numpy(np.argsort(p_KV.numpy(), -1))
    return p_KV.gather(-1, order_KV), order_KV


def _sort_values(q_KV: Tensor) -> Tensor:
    """Sort rows, on a CPU in place by numpy, 20 times faster."""
    if q_KV.device.type != "cpu":
        return q_KV.sort(dim=-1).values
    q_KV.numpy().sort(-1)
    return q_KV


_DISTANCES: dict[Distance, Callable[[Tensor, Tensor], _Value]] = {
    "reverse_kl": partial(_kl, reverse=True),
    "forward_kl": partial(_kl, reverse=False),
    "sorted_l1": _sorted_l1,
}


@torch.no_grad()
def entropies(states: HeadStates) -> Tensor:
    """Return the entropies of all distributions in nats, float32 [M]."""
    states, count = states.cast(), len(states.hidden_MD)
    entropy_M = torch.empty(count, device=states.hidden_MD.device)
    rows = rows_per_tile(count, states.weight_VD)
    for start in range(0, count, rows):
        tile = slice(start, start + rows)
        entropy_M[tile] = torch.special.entr(states.logits(tile).softmax(-1)).sum(-1)
    return entropy_M
