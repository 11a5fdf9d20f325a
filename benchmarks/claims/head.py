"""Compare the output head with PyTorch's own ways, forward and backward, with all tokens weighted.

Our head weights each token by acceptance. PyTorch's ways are full logits with `cross_entropy`, and
`linear_cross_entropy` in chunks of as many rows as our tiles. PyTorch's own chunks, at most 16 rows
here, are slower. Hidden states and heads are random; the first size is SmolLM2-135M's. Each way has
its own process. Time is the shortest turn in processor time of one thread, summed over all heads.
Memory is what a turn adds, gradients included; its ratio is that of the worst head.
`--set model=DIR` measures a model's real head instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Claim, Measured, Skipped, Way, take_turns_apart
from vocagnolm.guidance import accept_tokens
from vocagnolm.output_head import Head, trained_rows_per_tile
from vocagnolm.weighted_loss import OwnWeights

CLAIMS = (
    Claim(
        "chunked time",
        "training on all tokens takes the head no longer than linear_cross_entropy in chunks",
        at_most=1.0,
    ),
    Claim("chunked memory", "and 1.1 times its memory", at_most=1.1),
    Claim("full time", "and no longer than full logits", at_most=1.0),
    Claim("full memory", "and a third of their memory", at_most=0.333),
)
WAYS = OURS, CHUNKED, FULL_LOGITS = "ours", "chunked", "full"


@dataclass(frozen=True)
class Size:
    """Labelled tokens, and heads as pairs of vocabulary and hidden size.

    Attributes:
        model: a directory of a model, whose head is measured instead of random ones.
    """

    tokens: int = 1024
    heads: str = "49152x576 32000x512 152064x256"
    model: str = ""
    turns: int = 3


FULL, TINY = Size(), Size(tokens=64, heads="300x8 1000x16", turns=1)


def measure(size: Size) -> Measured:
    """Return the ratios of total time, and the largest ratios of memory."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Skipped("this PyTorch has no linear_cross_entropy")
    total_s = dict.fromkeys(WAYS, 0.0)
    largest = dict.fromkeys(WAYS, 0.0)
    details = []
    for name, make in _weights(size).items():
        makers = {way: partial(_way, way, make, size.tokens) for way in WAYS}
        found = take_turns_apart(makers, size.turns, memory=2)
        seconds = {way: min(turns.seconds) for way, turns in found.items()}
        # At the tiny size, a turn may not even add a page of memory.
        added = {way: max(1, min(turns.added_bytes)) for way, turns in found.items()}
        for way in WAYS:
            total_s[way] += seconds[way]
            memory = added[OURS] / added[way]
            largest[way] = max(largest[way], memory)
            details.append(
                f"{name:14}{way:10}{seconds[way]:8.2f} s{added[way] / 2**20:8,.0f} MiB, "
                f"ours / {way} {seconds[OURS] / seconds[way]:.2f} {memory:.2f}"
            )
    values = {
        "chunked time": total_s[OURS] / total_s[CHUNKED],
        "chunked memory": largest[CHUNKED],
        "full time": total_s[OURS] / total_s[FULL_LOGITS],
        "full memory": largest[FULL_LOGITS],
    }
    return Measured(values, details)


def _weights(size: Size) -> dict[str, Callable[[], Tensor]]:
    """Return a function for each head, by name, that makes its weight [V, D]."""
    if size.model:
        return {"real": partial(_real_weight, size.model)}
    makers: dict[str, Callable[[], Tensor]] = {}
    for name in size.heads.split():
        words, hidden = map(int, name.split("x"))
        makers[name] = partial(torch.randn, words, hidden)
    return makers


def _real_weight(directory: str) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weight: Tensor = model.get_output_embeddings().weight.detach()
    return weight


def _way(name: str, make: Callable[[], Tensor], tokens: int) -> Way:
    """Make random inputs, and one way to compute their loss and its gradients."""
    torch.manual_seed(0)
    weight_VD = nn.Parameter(make())
    words, hidden = weight_VD.shape
    # One extra position, which predicts nothing.
    hidden_ND = nn.Parameter(torch.randn(tokens + 1, hidden) / hidden**0.5)
    targets_N = torch.randint(words, (tokens + 1,))
    targets_N[-1] = -100
    teacher_loss_N = 12 * torch.rand(tokens + 1)
    head = Head(weight_VD, None, 1.0, None, torch.float32)

    def weigh(loss_K: Tensor, token_K: Tensor) -> Tensor:
        every_K = torch.ones_like(token_K, dtype=torch.bool)
        return accept_tokens(loss_K, teacher_loss_N[token_K], every_K, every_K)

    def loss() -> Tensor:
        if name == OURS:
            own_weights = OwnWeights(torch.arange(1, tokens + 1), weigh)
            return own_weights.losses(hidden_ND[None], targets_N[None], head)[0]
        if name == FULL_LOGITS:
            return F.cross_entropy(F.linear(hidden_ND, weight_VD), targets_N, reduction="sum")
        rows = trained_rows_per_tile(tokens, head)
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
        return F.linear_cross_entropy(
            hidden_ND, weight_VD, targets_N, reduction="sum", options=options
        )

    def forget(turn: int) -> None:
        hidden_ND.grad = weight_VD.grad = None

    return Way(lambda _: loss().backward(), forget)  # type: ignore[no-untyped-call]
