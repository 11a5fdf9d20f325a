"""How well a teacher's vocabulary and the tokens of a text map to a student's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import UNMAPPED, Spans
from vocagnolm.token_bytes import byte_level, sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Shares = npt.NDArray[np.float64]

# A student part A and a teacher part B of a text, as sets of characters, have IoU = |A n B| / |A u
# B| and IoS = |A n B| / |A| (Sections 2 and 6.1 of the paper).
#
# Spans are those of `spans.encode_batch`: without gaps, and none empty. So consecutive tokens cover
# everything from the start of the first to the end of the last.


def vocabulary_overlap(
    student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Return the shares of the teacher's tokens that the student has, as written and as bytes."""
    words, decoded = set(teacher.get_vocab()), decoded_vocabulary(teacher)
    shared_words = words.intersection(student.get_vocab())
    shared_decoded = decoded & decoded_vocabulary(student)
    return {
        "raw": len(shared_words) / len(words),
        "bytes": len(shared_decoded) / len(decoded),
    }


def decoded_vocabulary(tokenizer: PreTrainedTokenizerBase) -> set[bytes]:
    """Decode the tokens of a vocabulary to bytes. Added tokens stand for themselves."""
    # Tokenizers spell the same token differently: " a" is "Ġa" for byte-level ones and "▁a" for
    # SentencePiece.
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps([backend["pre_tokenizer"], backend["decoder"]])
    spell = byte_level if is_byte_level else sentencepiece
    # Added tokens are stored separately from the model's vocabulary, and are written as they are.
    added = {token["content"] for token in backend["added_tokens"]}

    def decode(word: str) -> bytes:
        try:
            return word.encode() if word in added else spell(word)
        # The token has a letter that stands for no byte.
        except KeyError:
            return word.encode()

    return {decode(word) for word in tokenizer.get_vocab()}


def overlaps(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> tuple[Shares, Shares]:
    """Return IoU and IoS [N] of every student token with the teacher tokens of its range.

    Spans are of one text, [N, 2] and [M, 2]. Ranges [N, 2] are half-open, or (-1, -1), for which
    both are 0.

    >>> student = np.array([[0, 3], [3, 5]])  # "a+b", "=c"
    >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
    >>> iou, ios = overlaps(student, teacher, np.array([[0, 2], [1, 3]]))
    >>> iou.tolist(), ios.tolist()
    ([0.75, 0.5], [1.0, 1.0])
    """
    # A token without a range keeps 0 for both.
    iou, ios = np.zeros((2, len(student_spans)))
    mapped = ranges[:, 0] != UNMAPPED
    mapped_spans = student_spans[mapped]
    hulls = hull(teacher_spans, ranges[mapped])
    starts = np.maximum(mapped_spans[:, 0], hulls[:, 0])
    ends = np.minimum(mapped_spans[:, 1], hulls[:, 1])
    # Spans that do not meet share no character, and have a negative difference.
    shared = np.maximum(ends - starts, 0)
    student_lengths = mapped_spans[:, 1] - mapped_spans[:, 0]
    teacher_lengths = hulls[:, 1] - hulls[:, 0]
    iou[mapped] = shared / (student_lengths + teacher_lengths - shared)
    ios[mapped] = shared / student_lengths
    return iou, ios


def hull(spans: Spans, ranges: Spans) -> Spans:
    """Return the characters from the first token of each range to its last."""
    return np.stack((spans[ranges[:, 0], 0], spans[ranges[:, 1] - 1, 1]), axis=1)


def count_map(student_spans: Spans, teacher_spans: Spans, ranges: Spans) -> dict[str, float]:
    """Count the kinds of student tokens in one text; spans and ranges as in `overlaps`.

    All are sums over tokens, so the counts of texts can be added.
    """
    iou, ios = overlaps(student_spans, teacher_spans, ranges)
    is_mapped = ranges[:, 0] != UNMAPPED
    # An unmapped range is (-1, -1), whose size is 0.
    sizes = ranges[:, 1] - ranges[:, 0]
    mapped = ranges[is_mapped]
    # How many characters later than its range each token starts and ends, [mapped, 2].
    differences = student_spans[is_mapped] - hull(teacher_spans, mapped)
    same_span = (sizes[is_mapped] == 1) & ~differences.any(axis=1)
    straddling = (differences[:, 0] > 0) | (differences[:, 1] < 0)
    return {
        "student_tokens": len(student_spans),
        "teacher_tokens": len(teacher_spans),
        "unmapped": len(ranges) - len(mapped),
        # The range has two or more teacher tokens (one-to-many).
        "several": int((sizes > 1).sum()),
        # The range is one teacher token with the same characters (one-to-one).
        "same_span": int(same_span.sum()),
        # The first teacher token also belongs to the token before (many-to-one).
        "shared": int((mapped[1:, 0] < mapped[:-1, 1]).sum()),
        # The range begins before the token or ends after it.
        "straddling": int(straddling.sum()),
        "iou_sum": float(iou.sum()),
        "ios_sum": float(ios.sum()),
    }


def map_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the ratio of tokens, and the shares of the kinds, which overlap."""
    tokens = counts["student_tokens"]
    return {
        "teacher_tokens_per_student_token": counts["teacher_tokens"] / tokens,
        "mapped": 1 - counts["unmapped"] / tokens,
        "unmapped": counts["unmapped"] / tokens,
        "one_to_one": counts["same_span"] / tokens,
        "one_to_many": counts["several"] / tokens,
        "many_to_one": counts["shared"] / tokens,
        "straddling": counts["straddling"] / tokens,
        "iou": counts["iou_sum"] / tokens,
        "ios": counts["ios_sum"] / tokens,
    }
