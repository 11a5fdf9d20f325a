"""Count the bytes of a prepared corpus for each token of the student.

Of the texts and tokenizers of `preparation_time`, whose options are taken too.
"""

from __future__ import annotations

import datasets

from benchmarks.claims.preparation_time import FULL, SMALL, TINY, Size, load
from benchmarks.harness import Claim, Measured
from vocagnolm.data import align_corpus

CLAIM = Claim("prepared data take at most 8 bytes for each student token", at_most=8, unit="bytes")
__all__ = ["CLAIM", "FULL", "SMALL", "TINY", "measure"]


def measure(size: Size) -> Measured:
    """Return the bytes of all columns for each token."""
    texts, readers = load(size)
    segments = align_corpus(datasets.Dataset.from_dict({"text": texts}), *readers)
    student, teacher = (segments.total(f"{side}_tokens") for side in ("student", "teacher"))
    lengths = f"{len(texts):,} documents, {student / len(segments.rows):,.0f} tokens in a segment"
    details = (lengths, f"{teacher / student:.3f} tokens of the teacher for each of the student")
    return Measured(segments.rows.data.nbytes / student, details)
