"""Compare the losses of a large head, forward and backward, with what others do for them.

One loss for every token of random hidden states, and the gradients of their sum at states and
weight; time of one thread and the most that a turn adds to the memory, each way in a process of its
own. Error: of the gradient at the states against float64, relative to its norm.

Ours makes the logits of a token again for its gradient, and only where its loss is used: with all
used, as in CPT, that is a fourth product of matrices beside three; the claim is about the 40 % of
largest loss, as guided training has them. Others: full logits and `cross_entropy`;
`linear_cross_entropy` of PyTorch in chunks of 64 rows, where this one has it (its default is one
row here, and takes nine times as long); TRL's `ChunkedLogProbFunction`; Liger's fused loss, where
there is a GPU. PyTorch and Liger make the gradient in the forward pass, of a sum whose weights are
known before it: they cannot select tokens by their losses.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Claim, Measured, Way, take_turns_apart
from vocagnolm.output_head import Head
from vocagnolm.token_loss import _TokenLoss

CLAIM = Claim(
    "losses of a 152,000-word head, 40 % used, take at most the time of full logits",
    at_most=1.0,
    unit="x",
)
OURS, SELECTED, FULL_LOGITS = "ours", "ours, 40 % used", "full logits"


@dataclass(frozen=True)
class Size:
    """Tokens, words and width of the head."""

    tokens: int = 1024
    vocabulary: int = 152_064
    hidden: int = 256
    turns: int = 7


FULL, SMALL = Size(), Size(tokens=512, turns=2)
TINY = Size(tokens=64, vocabulary=2000, hidden=32, turns=1)


def measure(size: Size) -> Measured:
    """Return the time of ours as a share of that of full logits."""
    names = [name for name in LOSSES if available(name)]
    makers = {name: partial(make_way, name, size) for name in names}
    ways = take_turns_apart(makers, size.turns, memory=1)
    expected = gradient(FULL_LOGITS, size, torch.float64)
    few = gradient(SELECTED, size, torch.float64)
    details, logits_bytes = [], size.tokens * size.vocabulary * 4
    for name, way in ways.items():
        right = few if name == SELECTED else expected
        error = (gradient(name, size, torch.float32) - right).norm() / right.norm()
        share = statistics.median(way.added_bytes) / logits_bytes
        details.append(
            f"{name:18}{way.spread}{way.added}, {share:6.1%} of logits; error {error:.1e}"
        )
    return Measured(ways[SELECTED].median_s / ways[FULL_LOGITS].median_s, tuple(details))


def inputs(size: Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the head's weight, and the tokens that are predicted."""
    torch.manual_seed(0)
    states = torch.randn(size.tokens, size.hidden).to(dtype).requires_grad_()
    weight = (torch.randn(size.vocabulary, size.hidden) / size.hidden**0.5).to(dtype)
    return states, weight.requires_grad_(), torch.randint(size.vocabulary, (size.tokens,))


def make_way(name: str, size: Size) -> Way:
    """Make a way, in its process."""
    states, weight, targets = inputs(size, torch.float32)

    def run(_: object) -> None:
        LOSSES[name](states, weight, targets).backward()
        states.grad = weight.grad = None

    return Way(run)


def gradient(name: str, size: Size, dtype: torch.dtype) -> Tensor:
    """The gradient at the hidden states."""
    states, weight, targets = inputs(size, dtype)
    LOSSES[name](states, weight, targets).backward()
    assert states.grad is not None
    return states.grad.double()


def ours(states: Tensor, weight: Tensor, targets: Tensor, share: float = 1.0) -> Tensor:
    """The sum of the largest of our token losses."""
    head = Head(1.0, None, states.dtype)
    given = (targets, torch.arange(len(targets)), head, None)
    losses: Tensor = _TokenLoss.apply(states, weight, None, *given)  # type: ignore[no-untyped-call]
    return losses.topk(round(share * len(losses))).values.sum()


def full_logits(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once."""
    return F.cross_entropy(F.linear(states, weight), targets, reduction="sum")


def pytorch(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's fused loss."""
    loss: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
    make: Any = torch.nn.LinearCrossEntropyOptions  # type: ignore[attr-defined]
    options = make(batch_chunk_size=64, chunking_method=None)
    found: Tensor = loss(states, weight, targets, reduction="sum", options=options)
    return found


def available(name: str) -> bool:
    """Try a way on nothing to speak of; no backward pass, before processes are forked."""
    try:
        LOSSES[name](*inputs(TINY, torch.float32))
    except (ImportError, AttributeError):
        return False
    return True


def trl(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """TRL's chunks, as its trainers call them."""
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    chunk = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE
    found: Tensor = function.apply(states, weight, None, targets, 1.0, chunk, None, 1.0, ())[0]
    return -found.sum()


def liger(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger's fused loss."""
    if not torch.cuda.is_available():
        raise ImportError
    function = importlib.import_module("liger_kernel.transformers")
    found: Tensor = function.LigerFusedLinearCrossEntropyLoss(reduction="sum")(
        weight, states, targets
    )
    return found


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    OURS: ours,
    SELECTED: partial(ours, share=0.4),
    FULL_LOGITS: full_logits,
    "PyTorch's chunks": pytorch,
    "TRL's chunks": trl,
    "Liger": liger,
}
