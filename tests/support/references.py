"""Slow references: losses from full logits, weights by loops, distances as in a textbook."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.method import Method

PARAMETER_TOLERANCE = 1e-6
LOSS_TOLERANCE = 1e-5


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).detach().abs().max().item() for name in a)


def full_losses(model: Any, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor):
    """Losses from full logits, one document at a time, in Python."""
    losses = torch.zeros(ids.shape, dtype=torch.float64)
    for row in range(len(ids)):
        starts = [t for t in range(ids.shape[1]) if positions[row, t] == 0]
        for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
            told = labels[row, start + 1 : end]
            if (told != IGNORED_LABEL).any():  # not padding
                logits = model(ids[row : row + 1, start:end], use_cache=False).logits[0, :-1]
                losses[row, start + 1 : end] = F.cross_entropy(logits, told, reduction="none")
    return losses


def both_losses(batch: dict[str, Any], student: Any, teacher: Any) -> tuple[Tensor, Tensor]:
    """The losses of a batch by the student and by the teacher, from full logits."""
    rows = ("input_ids", "position_ids", "labels")
    ours = full_losses(student, *(batch[name] for name in rows))
    with torch.no_grad():
        theirs = full_losses(teacher, *(batch[f"teacher_{name}"] for name in rows))
    return ours, theirs


def slow_weights(
    batch: dict[str, Any], student: torch.Tensor, teacher: torch.Tensor, g: Method
) -> torch.Tensor:
    """Eq. 2 and Eq. 4 with loops, for scope "sequence"; or acceptance."""
    by_share = "share" in (g.aggregation, g.selection.replace("accept", "share"))
    mean = {"mean": lambda x: sum(x) / len(x)}
    reduce = sum if by_share else ({"max": max} | mean).get(g.aggregation, sum)
    weights = torch.zeros(student.shape)
    for row in range(len(student)):
        excess = {}
        for t in range(student.shape[1]):
            if batch["labels"][row, t] == IGNORED_LABEL:
                continue
            first, last = batch["teacher_ranges"][row, t].tolist()
            if first == -1:
                weights[row, t] = float(g.unmapped == "include" or g.selection == "accept")
            else:
                losses = [float(x) for x in teacher[row, first:last]]
                if by_share:
                    share = batch["teacher_shares"][row, t].tolist()
                    middle = [share[1]] * (last - first - 2)
                    shares = [share[0], *middle, share[2]][: last - first]
                    losses = [x * s for x, s in zip(losses, shares, strict=True)]
                guide = reduce(losses)
                excess[t] = float(student[row, t]) - guide
        if g.selection == "accept":
            for t, value in excess.items():
                weights[row, t] = min(1.0, math.exp(value))
            continue
        count = math.ceil(round(g.top_k * len(excess), 9))
        for t in sorted(excess, key=lambda t: -excess[t])[:count]:
            weights[row, t] = 1.0
    return weights


def slow_distance(distance: str, student: Tensor, teacher: Tensor) -> Tensor:
    """One number from two vectors of logits, as in a textbook."""
    if distance == "sorted_l1":
        p, q = (
            sorted(torch.softmax(x, -1).unbind(), key=float, reverse=True)
            for x in (student, teacher)
        )
        zero = torch.zeros((), dtype=student.dtype)
        size = max(len(p), len(q))
        p, q = (x + [zero] * (size - len(x)) for x in (p, q))
        return torch.stack([(a - b).abs() for a, b in zip(p, q, strict=True)]).sum()
    words = min(len(student), len(teacher))
    p, q = (torch.log_softmax(x[:words], -1) for x in (student, teacher))
    a, b = (p, q) if distance == "reverse_kl" else (q, p)
    return F.kl_div(b, a, reduction="sum", log_target=True)
