"""Compare the memory of KLD and ULD, forward and backward, with that of full distributions.

KLD with the student's vocabulary and with the teacher's for both models, ULD with the first for the
student and the second for the teacher; the value is the largest share of the three. Extra memory at
the peak of a process of its own, on random hidden states and heads, so that nothing else is
measured. The full distributions of 2,048 tokens take 8 GiB, of 4,096 more than 16.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Claim, Measured, alone, resident_bytes
from vocagnolm import output_head
from vocagnolm.distillation import HeadStates, Pairs
from vocagnolm.output_head import Head

CLAIM = Claim(
    "KLD and ULD take at most a quarter of the memory of full distributions",
    at_most=0.25,
    unit="%",
)
DISTANCES: dict[str, Literal["reverse_kl", "sorted_l1"]] = {"kld": "reverse_kl", "uld": "sorted_l1"}


@dataclass(frozen=True)
class Size:
    """Pairs of distributions, and the two vocabularies; no `tile_logits` is the library's own."""

    tokens: int = 2048
    words: int = 32_000
    teacher_words: int = 152_064
    hidden: int = 64
    tile_logits: int = 0


FULL, SMALL = Size(), Size(tokens=1024)
TINY = Size(tokens=512, words=2000, teacher_words=8000, tile_logits=50_000)


def measure(size: Size) -> Measured:
    """Return the largest share of the naive version's extra memory."""
    ours, theirs = size.words, size.teacher_words
    shares, details = [], []
    for method, words in (
        ("kld", (ours, ours)),
        ("kld", (theirs, theirs)),
        ("uld", (ours, theirs)),
    ):
        (tiles, tiles_s), (naive, naive_s) = (
            alone(step_memory, method, way, words, size) for way in ("tiles", "naive")
        )
        shares.append(tiles / naive)
        details.append(
            f"{method}, {words[0]:,} and {words[1]:,} words: {tiles / 2**20:,.0f} MiB in "
            f"{tiles_s:.1f} s, naive {naive / 2**20:,.0f} MiB in {naive_s:.1f} s: {shares[-1]:.1%}"
        )
    return Measured(max(shares), tuple(details))


def step_memory(method: str, way: str, words: tuple[int, int], size: Size) -> tuple[int, float]:
    """Take one step over all pairs, and return the extra bytes and the seconds."""
    output_head.TILE_LOGITS = size.tile_logits or output_head.TILE_LOGITS
    torch.manual_seed(0)
    head = Head(1.0, None, torch.float32)
    student, teacher = (torch.randn(size.tokens + 1, size.hidden) for _ in range(2))
    ours, theirs = (torch.randn(n, size.hidden) / size.hidden**0.5 for n in words)

    def tiles(states: Tensor, weight: Tensor, rows: int) -> Tensor:
        places = torch.arange(1, rows + 1)
        of_teacher = HeadStates(teacher, theirs, None, head)
        pairs = Pairs(of_teacher, places, places, places[:0], DISTANCES[method], 1.0)
        targets = places.new_zeros(1, len(states))
        return pairs.losses(states[None], targets, weight, None, head)[0]

    def naive(states: Tensor, weight: Tensor, rows: int) -> Tensor:
        p = states[:rows] @ weight.T
        q = teacher[:rows] @ theirs.T
        if method == "kld":
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        p, q = (x.softmax(-1).sort(dim=-1, descending=True).values for x in (p, q))
        p, q = (F.pad(x, (0, max(words) - x.shape[-1])) for x in (p, q))
        return (p - q).abs().sum(-1)

    def step(rows: int) -> None:
        states, weight = (x.clone().requires_grad_() for x in (student, ours))
        (tiles if way == "tiles" else naive)(states, weight, rows).sum().backward()

    step(2)  # what is allocated once, for any number of tokens
    before, start_s = resident_bytes("VmRSS"), time.perf_counter()
    step(size.tokens)
    seconds = time.perf_counter() - start_s
    return max(resident_bytes("VmHWM") - before, 1), seconds
