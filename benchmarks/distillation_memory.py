"""Peak extra memory and time of KLD and ULD, forward and backward, beside those of full logits.

    python benchmarks/distillation_memory.py --tokens 4096 --words 32000 --teacher_words 152064

The claim: less than a quarter of the naive version's peak. KLD with both vocabularies for student
and teacher, ULD with the first for the student and the second for the teacher. Every way runs in a
process of its own, on random hidden states and heads, so that nothing else is measured. One JSON
object a line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from typing import Any

import torch
from token_loss_memory import resident_bytes
from torch.nn import functional as F

from vocagnolm import output_head
from vocagnolm.distillation import HeadStates, Pairs
from vocagnolm.output_head import Head


def measure(
    method: str, way: str, tokens: int, words: tuple[int, int], hidden: int
) -> dict[str, float]:
    """`extra_bytes` and `seconds` of one step over `tokens` pairs of distributions."""
    torch.manual_seed(0)
    head = Head(1.0, None, torch.float32)
    student, teacher = (torch.randn(tokens + 1, hidden) for _ in range(2))
    ours, theirs = (torch.randn(n, hidden) / hidden**0.5 for n in words)
    distance: Any = {"kld": "reverse_kl", "uld": "sorted_l1"}[method]

    def chunked(states: Any, weight: Any, rows: int) -> Any:
        places = torch.arange(1, rows + 1)
        pairs = Pairs(HeadStates(teacher, theirs, None, head), places, places)
        return pairs.distances(distance, states[None], weight, None, head)

    def naive(states: Any, weight: Any, rows: int) -> Any:
        p = states[:rows] @ weight.T
        q = teacher[:rows] @ theirs.T
        if method == "kld":
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            return (log_p.exp() * (log_p - log_q)).sum(-1)
        p, q = (x.softmax(-1).sort(dim=-1, descending=True).values for x in (p, q))
        size = max(words)
        p, q = (F.pad(x, (0, size - x.shape[-1])) for x in (p, q))
        return (p - q).abs().sum(-1)

    def step(rows: int) -> float:
        states, weight = (x.clone().requires_grad_() for x in (student, ours))
        total = (chunked if way == "chunked" else naive)(states, weight, rows).sum()
        total.backward()
        return float(total.detach())

    step(2)  # what is allocated once, for any number of tokens
    before, start_s = resident_bytes("VmRSS"), time.perf_counter()
    value = step(tokens)
    seconds = time.perf_counter() - start_s
    extra = max(resident_bytes("VmHWM") - before, 1)
    return {"extra_bytes": extra, "seconds": seconds, "mean_distance": value / tokens}


def _alone(*arguments: Any) -> dict[str, float]:
    """`measure` in a process of its own, forked before this one has computed anything."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    """Measure all cases, or with `--method` and `--way` one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=4096)
    add("--words", type=int, default=32_000, help="of the student's vocabulary")
    add("--teacher_words", type=int, default=152_064)
    add("--hidden", type=int, default=64)
    add("--tile_logits", type=int, help="logits held at once; the library's number if not given")
    add("--method", choices=("kld", "uld"))
    add("--way", choices=("chunked", "naive"))
    args = parser.parse_args()
    words = args.words, args.teacher_words
    output_head.TILE_LOGITS = args.tile_logits or output_head.TILE_LOGITS
    if args.way:
        found = measure(args.method, args.way, args.tokens, words, args.hidden)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    cases = (("kld", words[0], words[0]), ("kld", words[1], words[1]), ("uld", *words))
    for method, ours, theirs in cases:
        options = {"tokens": args.tokens, "words": ours, "teacher_words": theirs}
        chunked, naive = (
            _alone(method, way, args.tokens, (ours, theirs), args.hidden)
            for way in ("chunked", "naive")
        )
        share = chunked["extra_bytes"] / naive["extra_bytes"]
        line = {"method": method, **options, "share_of_naive": round(share, 3)}
        line |= {"chunked": chunked, "naive": naive}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
