"""Measure how well two tokenizers fit: tokens in common, and characters that aligned tokens share.

A text part A of the student and a part B of the teacher, as sets of characters, give
IoU = |A n B| / |A u B| and IoS = |A n B| / |A| (Sections 2 and 6.1 of the paper).

Spans are those of `spans.encode_batch`, without gaps and none empty: tokens that follow one another
cover everything between the start of the first and the end of the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import UNMAPPED
from vocagnolm.spans import Spans, byte_level, sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shares = npt.NDArray[np.float64]


def vocabulary_overlap(student: Set[object], teacher: Set[object]) -> dict[str, float]:
    """Count the tokens in common, and their share of the teacher's, the student's and either's."""
    shared = len(student & teacher)
    return {
        "teacher": shared / len(teacher),
        "student": shared / len(student),
        "union": shared / len(student | teacher),
        "shared": shared,
        "teacher_size": len(teacher),
        "student_size": len(student),
    }


def decoded_vocabulary(tokenizer: PreTrainedTokenizerBase) -> set[bytes]:
    """Decode the tokens of a vocabulary to byte strings; added tokens are themselves."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps([backend["pre_tokenizer"], backend["decoder"]])
    spell = byte_level if is_byte_level else sentencepiece
    added = {token["content"] for token in backend["added_tokens"]}

    def decode(word: str) -> bytes:
        try:
            return word.encode() if word in added else spell(word)
        # A letter that stands for no byte.
        except KeyError:
            return word.encode()

    return {*map(decode, tokenizer.get_vocab())}


def overlaps(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> tuple[Shares, Shares]:
    """Return IoU and IoS [N] of every student token with the teacher tokens of its range.

    Args:
        student_spans: int64 [N, 2].
        teacher_spans: int64 [M, 2], over the same text.
        ranges: int64 [N, 2], half-open ranges of teacher tokens, or (-1, -1): then both are 0.

    >>> student = np.array([[0, 3], [3, 5]])  # "a+b", "=c"
    >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
    >>> iou, ios = overlaps(student, teacher, np.array([[0, 2], [1, 3]]))
    >>> iou.tolist(), ios.tolist()
    ([0.75, 0.5], [1.0, 1.0])
    """
    iou, ios = np.zeros((2, len(student_spans)))
    mapped = ranges[:, 0] != UNMAPPED
    ours, theirs = student_spans[mapped], _hull(teacher_spans, ranges[mapped])
    starts, ends = np.maximum(ours[:, 0], theirs[:, 0]), np.minimum(ours[:, 1], theirs[:, 1])
    shared = np.maximum(ends - starts, 0)
    lengths = ours[:, 1] - ours[:, 0]
    iou[mapped] = shared / (lengths + theirs[:, 1] - theirs[:, 0] - shared)
    ios[mapped] = shared / lengths
    return iou, ios


def chunk_overlaps(
    student_spans: Spans, teacher_spans: Spans, chunks: int
) -> tuple[Shares, Shares]:
    """Return IoU and IoS of the student's chunks that have tokens with the teacher's."""
    # Here, because it brings torch, which the command's --help does not need.
    from vocagnolm.packing import chunk_edges

    both = (chunk_edges(len(spans), chunks) for spans in (student_spans, teacher_spans))
    student, teacher = (np.stack((edges[:-1], edges[1:]), axis=1) for edges in both)
    teacher[teacher[:, 0] == teacher[:, 1]] = UNMAPPED
    # Fewer tokens than chunks leave chunks empty.
    filled = student[:, 0] < student[:, 1]
    return overlaps(_hull(student_spans, student[filled]), teacher_spans, teacher[filled])


def _hull(spans: Spans, ranges: Spans) -> Spans:
    """Return the characters from the first token of each range to its last."""
    return np.stack((spans[ranges[:, 0], 0], spans[ranges[:, 1] - 1, 1]), axis=1)


def count_map(
    characters: int, student_spans: Spans, teacher_spans: Spans, ranges: Spans
) -> dict[str, float]:
    """Count the kinds of student tokens in one text; spans and ranges as in `overlaps`.

    All are sums over tokens or characters, so counts of texts can be added.
    """
    iou, ios = overlaps(student_spans, teacher_spans, ranges)
    is_mapped = ranges[:, 0] != UNMAPPED
    sizes = ranges[:, 1] - ranges[:, 0]  # 0 where unmapped
    mapped = ranges[is_mapped]
    # Student less teacher, [start, end].
    before = student_spans[is_mapped] - _hull(teacher_spans, mapped)
    same_span = (sizes[is_mapped] == 1) & ~before.any(axis=1)
    straddling = (before[:, 0] > 0) | (before[:, 1] < 0)
    return {
        "characters": characters,
        "student_tokens": len(student_spans),
        "teacher_tokens": len(teacher_spans),
        # By the number of teacher tokens in their range.
        "unmapped": len(ranges) - len(mapped),
        "one": int((sizes == 1).sum()),
        "two": int((sizes == 2).sum()),
        "more": int((sizes > 2).sum()),
        # One teacher token of the same characters (one-to-one).
        "same_span": int(same_span.sum()),
        # The first teacher token is also one of the token before (many-to-one).
        "shared": int((mapped[1:, 0] < mapped[:-1, 1]).sum()),
        # The range begins before the token or ends after it.
        "straddling": int(straddling.sum()),
        "iou_sum": float(iou.sum()),
        "ios_sum": float(ios.sum()),
    }


def mean_overlaps(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the mean IoU and IoS of the student's tokens; 0 without any."""
    tokens = max(counts["student_tokens"], 1)
    return {name: counts[f"{name}_sum"] / tokens for name in ("iou", "ios")}


def map_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return ratios of tokens and characters, and the share of each kind, which overlap."""
    tokens, characters = counts["student_tokens"], counts["characters"]
    return {
        "teacher_tokens_per_student_token": counts["teacher_tokens"] / tokens,
        "student_tokens_per_character": tokens / characters,
        "teacher_tokens_per_character": counts["teacher_tokens"] / characters,
        "mapped": 1 - counts["unmapped"] / tokens,
        "unmapped": counts["unmapped"] / tokens,
        "range_of_1": counts["one"] / tokens,
        "range_of_2": counts["two"] / tokens,
        "range_of_3_or_more": counts["more"] / tokens,
        "one_to_one": counts["same_span"] / tokens,
        "one_to_many": (counts["two"] + counts["more"]) / tokens,
        "many_to_one": counts["shared"] / tokens,
        "straddling": counts["straddling"] / tokens,
    }
