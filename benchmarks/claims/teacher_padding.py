"""Count the padding of the teacher's rows, as blocks are drawn and as the steps order them.

A micro-batch's rows are as wide as its longest, rounded up to 64. The value is of steps of 64
blocks, 4 to a micro-batch; beside it are others, and the share of eight processes' positions that
are padding or waiting where the widest micro-batch of each moment is awaited. Texts, tokenizers and
contexts are those of `preparation_time`; nothing is timed.
"""

from __future__ import annotations

from dataclasses import replace

import datasets
import numpy as np
from accelerate.data_loader import SeedableRandomSampler

from benchmarks.claims import preparation_time
from benchmarks.claims.preparation_time import FULL, SMALL, Size, load
from benchmarks.harness import Claim, Measured
from vocagnolm.data import align_corpus
from vocagnolm.packing import Blocks, padded_width
from vocagnolm.run.resumable import StepSampler

CLAIM = Claim("ordering a step's blocks halves the padding of the teacher's rows", at_most=0.5)
__all__ = ["CLAIM", "FULL", "SMALL", "TINY", "measure"]
TINY = replace(preparation_time.TINY, contexts="64 128")
STEPS, ROWS, PROCESSES, SHOWN = (64, 256), (1, 2, 4, 8), 8, (64, 4)


def measure(size: Size) -> Measured:
    """Return the padding of ordered steps, as a share of that of drawn ones."""
    texts, readers = load(size)
    rows = align_corpus(datasets.Dataset.from_dict({"text": texts}), *readers).rows
    blocks = Blocks(rows, readers[0].limit, readers[1].limit)
    widths = blocks.teacher_tokens
    details = [
        f"{len(blocks):,} blocks of {blocks.max_length:,} tokens, {blocks.fill_fraction:.1%} full; "
        f"the teacher's {widths.mean():,.0f} +- {widths.std():,.0f} tokens"
    ]
    value = float("nan")
    for per_step in STEPS:
        if per_step > len(blocks):
            continue
        for together in ROWS:
            drawn, ordered = (wasted(blocks, per_step, together, is_on) for is_on in (False, True))
            parts = zip(("padding", f"{PROCESSES} processes"), drawn, ordered, strict=True)
            shown = "; ".join(f"{name} {a:5.1%}, ordered {b:5.1%}" for name, a, b in parts)
            details.append(f"steps of {per_step:3}, {together} in a micro-batch: {shown}")
            if (per_step, together) == SHOWN:
                value = ordered[0] / drawn[0]
                # The first token of a segment has no loss.
                ours = (blocks.student_tokens - len(rows)) / (len(blocks) * blocks.max_length)
                theirs = (1 - ordered[0]) * (1 - len(rows) / widths.sum())
                details.append(f"heads read {ours:.1%} of our positions, {theirs:.1%} of theirs")
    return Measured(value, tuple(details))


def wasted(blocks: Blocks, per_step: int, together: int, is_ordered: bool) -> tuple[float, float]:
    """Return the share of positions without a token in one process, and in several that wait."""
    whole = len(blocks) // per_step * per_step
    drawn = SeedableRandomSampler(blocks, num_samples=whole, data_seed=0)
    widths = blocks.teacher_tokens if is_ordered else None
    numbers = [*StepSampler(drawn, per_step, widths, lambda: 0)]
    tokens = blocks.teacher_tokens[numbers].reshape(-1, together)
    limit = blocks.teacher_max_length
    assert isinstance(limit, int)
    computed = np.array([padded_width(int(width), limit) for width in tokens.max(1)])
    awaited = computed.reshape(-1, PROCESSES).max(1).sum() * PROCESSES
    own, waiting = (1 - tokens.sum() / (together * found) for found in (computed.sum(), awaited))
    return own, waiting
