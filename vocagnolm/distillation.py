"""Distances between the distributions of student and teacher over words: Eq. (5), Eq. (6), entropy.

Two distributions over all words are held for one tile of tokens at a time; the backward pass makes
those of a tile again. The gradients are written out, so that exact zeros stay zero.

Shapes: N rows of the student, M of the teacher, R pairs, K of them in a tile, D hidden, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from vocagnolm.output_head import Head, HeadGradients, rows_per_tile

# KL(p_S || p_T), Eq. (5), and KL(p_T || p_S), over the words that student and teacher share; L1 of
# the probabilities sorted by size, the Wasserstein distance of ULD, Eq. (6), whatever the words.
Distance = Literal["reverse_kl", "forward_kl", "sorted_l1"]


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
    ) -> Tensor:
        """Return the distances, float32 [R], within the student's forward (see `token_loss.Also`).

        Gradient flows to the student's hidden states and output head only.
        """
        student = HeadStates(student_BSD.flatten(0, 1), weight_VD, bias_V, head)
        result: Tensor = _Distances.apply(*student, self, distance)  # type: ignore[no-untyped-call]
        return result


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
    ) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V)
        ctx.head, ctx.pairs, ctx.distance = head, pairs, distance
        student = HeadStates(hidden_ND, weight_VD, bias_V, head)
        count = len(pairs.token_R)
        value_R = torch.empty(count, dtype=head.sum_dtype, device=hidden_ND.device)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for tile, logits in _tiles(student, pairs):
                value_R[tile] = _DISTANCES[distance](*logits)[0]
        return value_R.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V = ctx.saved_tensors
        head: Head = ctx.head
        gradients = HeadGradients(ctx.needs_input_grad[:3], hidden_ND, weight_VD, bias_V, head)
        student = HeadStates(hidden_ND, weight_VD, bias_V, head).cast()
        with torch.autocast(grad_R.device.type, enabled=False):
            for tile, logits in _tiles(student, ctx.pairs):
                slope_KV = head.slope(logits[0])
                gradient_KV = _DISTANCES[ctx.distance](*logits)[1]()
                gradient_KV *= grad_R[tile, None].to(head.sum_dtype) * head.scale
                if slope_KV is not None:
                    gradient_KV *= slope_KV
                row_K = ctx.pairs.token_R[tile] - 1
                hidden_KD = hidden_ND[row_K].to(head.dtype)
                gradients.add(row_K, gradient_KV, hidden_KD, student.weight_VD)
        return *gradients.sums(), None, None, None


def _tiles(student: HeadStates, pairs: Pairs) -> Iterator[tuple[slice, tuple[Tensor, Tensor]]]:
    """The logits [K, V] of both models, of a few pairs at a time."""
    student, teacher, count = student.cast(), pairs.teacher.cast(), len(pairs.token_R)
    rows = rows_per_tile(count, student.weight_VD, teacher.weight_VD)
    for start in range(0, count, rows):
        tile = slice(start, start + rows)
        ours = student.logits(pairs.token_R[tile] - 1)
        yield tile, (ours, teacher.logits(pairs.teacher_token_R[tile] - 1))


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
    sorted_KV, order_KV = p_KV.sort(dim=-1, descending=True)
    other_KV = teacher_KV.to(p_KV.dtype).softmax(-1).sort(dim=-1, descending=True).values
    words, others = p_KV.shape[-1], other_KV.shape[-1]
    excess_KV = sorted_KV.sub_(F.pad(other_KV[:, :words], (0, max(0, words - others))))
    value_K = excess_KV.abs().sum(-1) + other_KV[:, words:].sum(-1)

    def gradient() -> Tensor:
        sign_KV = torch.empty_like(p_KV).scatter_(-1, order_KV, excess_KV.sign())
        mean_K1 = (p_KV * sign_KV).sum(-1, keepdim=True)
        return sign_KV.sub_(mean_K1).mul_(p_KV)

    return value_K, gradient


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
