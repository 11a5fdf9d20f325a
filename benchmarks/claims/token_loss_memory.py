"""Compare the memory of the teacher's token losses with that of its float32 logits.

Extra memory at the peak, of a model of random weights and one layer, so that the head is what is
measured; each way in a process of its own. Full logits with `F.cross_entropy` are shown beside it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.harness import Claim, Measured, alone, resident_bytes

CLAIM = Claim(
    "a teacher's token losses take at most 2 % of the memory of its logits",
    at_most=0.02,
    unit="%",
)


@dataclass(frozen=True)
class Size:
    """Tokens to score, in rows of at most 2,048; no `tile_logits` is the library's own."""

    tokens: int = 4096
    vocabulary: int = 152_064
    hidden: int = 64
    tile_logits: int = 0
    device: str = "cpu"


FULL, TINY = Size(), Size(tokens=256, vocabulary=8192, tile_logits=50_000)


def measure(size: Size) -> Measured:
    """Return the extra memory of the token losses, as a share of the logits'."""
    logits_bytes = size.tokens * size.vocabulary * 4
    found = {way: alone(score, way, size) for way in ("token losses", "full logits")}
    details = [f"the logits alone are {logits_bytes / 2**20:,.0f} MiB"]
    details += [
        f"{way:14}{extra / 2**20:10,.0f} MiB{extra / logits_bytes:8.1%}{seconds:7.1f} s"
        for way, (extra, seconds) in found.items()
    ]
    return Measured(found["token losses"][0] / logits_bytes, tuple(details))


def score(way: str, size: Size) -> tuple[int, float]:
    """Score the tokens once, and return the extra bytes and the seconds."""
    import torch
    from torch import Tensor
    from torch.nn import functional as F
    from transformers import LlamaConfig, LlamaForCausalLM

    from vocagnolm import output_head
    from vocagnolm.token_loss import add_token_losses

    output_head.TILE_LOGITS = size.tile_logits or output_head.TILE_LOGITS
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    model = add_token_losses(LlamaForCausalLM(config).to(size.device).eval())
    width, is_cuda = min(size.tokens, 2048), size.device == "cuda"
    ids_BT = torch.randint(size.vocabulary, (size.tokens // width, width), device=size.device)

    def run(ids_BT: Tensor) -> Tensor:
        if way == "token losses":
            return model(input_ids=ids_BT, labels=ids_BT, token_losses=True)
        logits = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")

    with torch.no_grad():
        run(ids_BT[:1, :16])  # what is allocated once, for any number of tokens
        before = torch.cuda.memory_allocated() if is_cuda else resident_bytes("VmRSS")
        start_s = time.perf_counter()
        run(ids_BT)[0].sum().item()
        seconds = time.perf_counter() - start_s
        peak = torch.cuda.max_memory_allocated() if is_cuda else resident_bytes("VmHWM")
    return peak - before, seconds
