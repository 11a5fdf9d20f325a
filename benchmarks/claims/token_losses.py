"""Compare a teacher's token losses with its float32 logits: memory and time.

The model has random weights and one layer, so that the head dominates. Each way has its own
process, which scores the tokens once. Memory is the extra memory at the peak, and time the median
wall-clock time of the turns. The full logits are the same model's, with `F.cross_entropy`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.harness import Claim, Measured, alone, resident_bytes

CLAIMS = (
    Claim(
        "memory",
        "a teacher's token losses take 2 % of the memory of its logits",
        at_most=0.02,
        unit="%",
    ),
    Claim("time", "and at most 0.6 of the time of computing with full logits", at_most=0.6),
)
WAYS = OURS, FULL_LOGITS = "token losses", "full logits"


@dataclass(frozen=True)
class Size:
    """Tokens to score, in rows of at most 2,048; `tile_logits` 0 is the library's default."""

    tokens: int = 4096
    vocabulary: int = 152_064
    hidden: int = 64
    tile_logits: int = 0
    turns: int = 2


FULL, TINY = Size(), Size(tokens=256, vocabulary=8192, tile_logits=50_000, turns=1)


def measure(size: Size) -> Measured:
    """Return the share of the logits' memory, and of the time with full logits."""
    logits_bytes = size.tokens * size.vocabulary * 4
    found: dict[str, list[tuple[int, float]]] = {way: [] for way in WAYS}
    for _ in range(size.turns):
        for way in WAYS:
            found[way].append(alone(score, way, size))
    extra = {way: min(added for added, _ in turns) for way, turns in found.items()}
    seconds = {way: statistics.median(took for _, took in turns) for way, turns in found.items()}
    details = [
        f"{way:14}{extra[way] / 2**20:10,.0f} MiB{extra[way] / logits_bytes:8.1%} of the logits"
        f"{seconds[way]:8.2f} s"
        for way in WAYS
    ]
    values = {
        "memory": extra[OURS] / logits_bytes,
        "time": seconds[OURS] / seconds[FULL_LOGITS],
    }
    return Measured(values, details)


def score(way: str, size: Size) -> tuple[int, float]:
    """Score the tokens once, and return the extra bytes and the seconds."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from benchmarks.models import llama
    from vocagnolm import add_token_losses, output_head

    output_head.TILE_LOGITS = size.tile_logits or output_head.TILE_LOGITS
    torch.manual_seed(0)
    model = add_token_losses(llama(size.vocabulary, size.hidden, 1, 1).eval())
    width = min(size.tokens, 2048)
    ids_BT = torch.randint(size.vocabulary, (size.tokens // width, width))

    def run(ids_BT: Tensor) -> Tensor:
        if way == OURS:
            return model(input_ids=ids_BT, labels=ids_BT, token_losses=True)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")

    with torch.no_grad():
        run(ids_BT[:1, :16])  # allocates what does not depend on the number of tokens
        before = resident_bytes("VmRSS")
        start_s = time.perf_counter()
        run(ids_BT)[0].sum().item()
        seconds = time.perf_counter() - start_s
    return resident_bytes("VmHWM") - before, seconds
