"""Packed sequences to inspect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import datasets
from transformers import PreTrainedTokenizerBase

from vocagnolm.collator import PackedCollator
from vocagnolm.guidance import TokenGuidance
from vocagnolm.packing import Blocks
from vocagnolm.report.view import TextView, view_texts


class Sample(NamedTuple):
    """A batch, the segments of each of its rows, their documents, and the student's tokenizer."""

    batch: Any
    segments: Sequence[Sequence[dict[str, Any]]]
    corpus: datasets.Dataset
    tokenizer: PreTrainedTokenizerBase

    def views(self, guidance: TokenGuidance) -> tuple[TextView, ...]:
        return view_texts(self.batch, guidance, *self[1:])


def sample_blocks(
    blocks: Blocks,
    indices: Sequence[int],
    segments: datasets.Dataset,
    corpus: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    batch = PackedCollator(blocks.max_length)([blocks[index] for index in indices])
    rows = [[segments[int(row)] for row in blocks.segments(index)] for index in indices]
    return Sample(batch, rows, corpus, tokenizer)
