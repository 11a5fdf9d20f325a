"""What a run is going to do, in plain text: `train.py --dry_run`, and the head of every run."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vocagnolm.alignment import align_spans
from vocagnolm.data import Segments
from vocagnolm.packing import Blocks
from vocagnolm.spans import encode
from vocagnolm.tokenizers import Reader

_GIB = 2**30


def describe_corpus(segments: Segments, blocks: Blocks, with_teacher: bool) -> list[str]:
    """Counts of what was aligned and packed, and of what was left out and why."""
    student, teacher = segments.total("student_tokens"), segments.total("teacher_tokens")
    documents = len(np.unique(segments.rows.with_format("numpy")["document"][:]))
    lines = [
        f"corpus     {documents:,} documents, {len(segments.rows):,} segments, "
        f"{student:,} student tokens",
        f"blocks     {len(blocks):,} of {blocks.max_length} tokens, "
        f"{blocks.fill_fraction:.1%} full",
    ]
    if with_teacher:
        lines.append(
            f"alignment  {teacher:,} teacher tokens ({teacher / student:.3f} per student token), "
            f"{segments.mapped_text_fraction:.2%} of the text tokens mapped"
        )
    return lines + describe_skipped(segments, "skipped")


def describe_skipped(segments: Segments, label: str) -> list[str]:
    """One line, if documents were left out."""
    if not segments.skipped:
        return []
    return [f"{label:10} {len(segments.skipped):,} documents ({skip_reasons(segments)})"]


def skip_reasons(segments: Segments) -> str:
    """The three most frequent reasons for leaving a document out, with counts."""
    reasons = Counter(reason for _, reason in segments.skipped)
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common(3))


def describe_memory(parts: dict[str, float]) -> list[str]:
    """A memory estimate per device, in GiB, from bytes by part."""
    shown = ", ".join(f"{name} {size / _GIB:.2f}" for name, size in parts.items())
    return [f"memory     about {sum(parts.values()) / _GIB:.2f} GiB per device: {shown}"]


def aligned_example(text: str, student: Reader, teacher: Reader, tokens: int = 16) -> list[str]:
    """The first tokens of a text, each with the teacher tokens it is guided by."""
    ours, theirs = encode(student.tokenizer, text), encode(teacher.tokenizer, text)
    ranges = align_spans(ours.spans, theirs.spans)
    lines = [f"{'student token':24} teacher tokens"]
    for (start, end), (first, last) in zip(ours.spans[:tokens], ranges, strict=False):
        pieces = " ".join(repr(text[a:b]) for a, b in theirs.spans[max(first, 0) : max(last, 0)])
        lines.append(f"{text[start:end]!r:24} {pieces or '(unmapped)'}")
    return lines
