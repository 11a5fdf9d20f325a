"""Token-level lexical alignment: which teacher tokens cover each student token.

Other trainers can use this module as a library. It needs only NumPy and a tokenizer of `tokenizers`
or transformers:

    encode             a text -> ids and spans of characters
    encode_ids         ids, such as sampled ones, and their text -> spans
    add_end            spans -> spans with an end token
    align_spans        two models' spans -> the teacher tokens that cover each student token
    covered_shares     how much of each teacher token lies in the student token
    aggregate_losses   a teacher's losses -> one per student token (Eq. 2)
    chunk_credit       two models' losses -> one advantage per student token
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import UNMAPPED, IntArray, Spans
from vocagnolm.credit import add_end, aggregate_losses, chunk_credit
from vocagnolm.spans import encode, encode_ids, find_disorder

__all__ = [
    "add_end",
    "aggregate_losses",
    "align_spans",
    "chunk_credit",
    "covered_shares",
    "encode",
    "encode_ids",
]


def align_spans(student_spans: Spans, teacher_spans: Spans) -> Spans:
    """Find the teacher tokens that cover every student token (Algorithm 1), in O(N log M).

    For each student token, two binary searches find the first teacher token that ends after its
    start and the last one that starts before its end. These are the ends of the smallest range of
    teacher tokens that covers it. If the teacher's spans have no gaps, the range covers all of its
    characters (an IoS of 100 %).

    Args:
        student_spans: int64 [N, 2], half-open spans of characters, from `encode`.
        teacher_spans: int64 [M, 2], of the same text.

    Returns:
        int64 [N, 2], half-open ranges of teacher tokens; (-1, -1) if no teacher token covers any
        character of the student token.

    Raises:
        ValueError: starts or ends decrease, so the search would be silently wrong.

    Examples:
        >>> student = np.array([[0, 3], [3, 5], [5, 6]])  # "a+b", "=c", "!"
        >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
        >>> align_spans(student, teacher).tolist()
        [[0, 2], [1, 3], [-1, -1]]
    """
    for name, spans in (("student", student_spans), ("teacher", teacher_spans)):
        if (wrong := find_disorder(spans)) is not None:
            raise ValueError(
                f"{name} spans must be in the order of the text, found {spans[wrong].tolist()} at"
                f" token {wrong}: encode without special tokens, whose spans are (0, 0)"
            )
    return find_ranges(student_spans, teacher_spans)


def find_ranges(student_spans: Spans, teacher_spans: Spans) -> Spans:
    """Do what `align_spans` does, without checking the order."""
    # text       a + b = c !
    # student    0 0 0 1 1 2        starts 0 3 5, ends 3 5 6
    # teacher    0 1 1 1 2          first that ends after a start: 0 1 3
    #                               first that does not start before an end: 2 3 3
    ranges = np.empty((len(student_spans), 2), dtype=np.int64)
    ranges[:, 0] = teacher_spans[:, 1].searchsorted(student_spans[:, 0], side="right")
    ranges[:, 1] = teacher_spans[:, 0].searchsorted(student_spans[:, 1], side="left")
    # Spans are half-open, so both searches leave out tokens that only touch. A student token in a
    # gap of the teacher's spans gets an empty range, or one that ends before it begins.
    is_unmapped = ranges[:, 0] >= ranges[:, 1]
    # Usually there is none, and the assignment would cost as much as a search.
    if np.count_nonzero(is_unmapped):
        ranges[is_unmapped] = UNMAPPED
    return ranges


def covered_shares(
    student_spans: Spans, teacher_spans: Spans, ranges: Spans
) -> npt.NDArray[np.float32]:
    """Return the share of each teacher token's characters that lie in a student token.

    In a range of `align_spans`, all tokens but the first and the last lie inside the student token.
    So three shares per range are enough, float32 [N, 3]: of the first token, of all tokens in
    between, and of the last. If a range has no such tokens, the share is 1.0. A character that m
    student tokens share, such as an emoji in several byte tokens, counts 1 / m for each. The shares
    of a teacher token over all student tokens therefore add up to 1.

    If a teacher splits a character that student tokens share, tokens in between have their mean
    share. This happens with a Unigram student's lone space mark before a text that does not begin
    with a space.

    >>> student, teacher = np.array([[0, 2], [2, 6]]), np.array([[0, 4], [4, 5], [5, 7]])
    >>> covered_shares(student, teacher, align_spans(student, teacher)).tolist()
    [[0.5, 1.0, 1.0], [0.5, 1.0, 0.5]]
    """
    shares = np.ones((len(ranges), 3), np.float32)
    if not len(teacher_spans):
        return shares
    # Most student tokens contain all of their range, and their shares stay 1.0. The others begin or
    # end inside a teacher token, or share a character with a neighbour. If a student token starts
    # before the previous one ends, they share a character, and both are marked.
    goes_back = student_spans[1:, 0] < student_spans[:-1, 1]
    is_part = np.append(goes_back, False) | np.append(False, goes_back)
    # Unmapped tokens read the last teacher token here, at index -1, and are dropped below.
    is_part |= teacher_spans[ranges[:, 0], 0] < student_spans[:, 0]
    is_part |= teacher_spans[np.maximum(ranges[:, 1] - 1, 0), 1] > student_spans[:, 1]
    part = np.flatnonzero(is_part & (ranges[:, 0] != UNMAPPED))
    # Each character counts 1 / (the number of student tokens that share it):
    #
    #     student      [0, 1)  [1, 2)  [1, 2)  [2, 4)      bytes of one character in the middle
    #     characters     0       1       2       3
    #     counts         1      1/2      1       1
    #     position   0       1      1.5     2.5     3.5    before each character, and at the end
    characters = max(student_spans[-1, 1], teacher_spans[-1, 1]) + 1
    position = np.arange(characters, dtype=np.float64)
    if goes_back.any():
        # The tokens that contain a character are those that have begun minus those that have ended.
        # A character that is in no student token counts 1, to avoid a division by 0.
        begun = np.bincount(student_spans[:, 0], minlength=characters)
        ended = np.bincount(student_spans[:, 1], minlength=characters)
        sharing = (begun - ended).cumsum()[:-1]
        position[1:] = np.cumsum(1 / np.maximum(sharing, 1))
    (starts, ends), (first, last) = student_spans[part].T, ranges[part].T
    tokens = last - first
    # Each column is for the teacher tokens from one to another, both inclusive, and exists only in
    # ranges with enough tokens: the first always, the last from two tokens on, and those in
    # between from three tokens on.
    columns = ((first, first, 1), (first + 1, last - 2, 3), (last - 1, last - 1, 2))
    for column, (from_token, to_token, fewest) in enumerate(columns):
        has_column = tokens >= fewest
        begin = teacher_spans[from_token[has_column], 0]
        end = teacher_spans[to_token[has_column], 1]
        covered_begin = np.maximum(begin, starts[has_column])
        covered_end = np.minimum(end, ends[has_column])
        covered = position[covered_end] - position[covered_begin]
        # A teacher token without characters has the share 1.0, without a division by 0.
        whole = np.maximum(end - begin, 1)
        shares[part[has_column], column] = np.where(end > begin, covered / whole, 1.0)
    return shares


def align_positions(student_tokens: int, teacher_tokens: int) -> Spans:
    """Map every student token to the teacher token of the same index (Boizard et al. 2025).

    >>> align_positions(3, 2).tolist()
    [[0, 1], [1, 2], [-1, -1]]
    """
    first = np.arange(student_tokens, dtype=np.int64)
    ranges = np.stack([first, first + 1], axis=-1)
    # If the teacher has fewer tokens, the student's other tokens have no partner.
    ranges[teacher_tokens:] = UNMAPPED
    return ranges


# Stands for a token that one byte does not hold.
_ESCAPE = 255


def narrow_spans(
    spans: Spans, edges: npt.ArrayLike | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], IntArray]:
    """Write spans in about a byte each, as `widen_spans` reads them.

    The spans are those of one row, or of several rows, concatenated, with these edges; each row
    begins at the character 0. Returns (codes [N], exceptions [3 M], edges of the rows in the
    exceptions). A code is 2 x length + overlap: the characters that a token goes beyond the end of
    the one before, and those that it shares with it.

        characters    0   1   2   3   4   5
        token 0       [-------)                 length 2, overlap 0   code 2 * 2 + 0 = 4
        token 1               [---)             length 1, overlap 0   code 2
        token 2               [---)             length 0, overlap 1   code 1: a byte of an emoji
        token 3                   [-------)     length 2, overlap 0   code 4

    Whatever one byte does not hold, as an overlap above 1, a gap or a length above 127, has the
    code 255, and its index in the row, length and overlap are listed apart.

    >>> narrow_spans(np.array([[0, 2], [2, 3], [2, 3], [3, 400]]))[:2]
    (array([  4,   2,   1, 255], dtype=uint8), array([  3, 397,   0], dtype=int32))
    """
    rows = np.asarray([0, len(spans)] if edges is None else edges)
    # A token is measured from the end of the one before it, and the first one of a row from 0.
    before = np.append(0, spans[:, 1])
    before[rows] = 0
    length, overlap = spans[:, 1] - before[:-1], before[:-1] - spans[:, 0]
    codes = 2 * length + overlap
    odd = np.flatnonzero((length < 0) | (overlap < 0) | (overlap > 1) | (codes >= _ESCAPE))
    codes[odd] = _ESCAPE
    # Exceptions name a token by its index in its row, because a row is read by itself.
    ends = odd.searchsorted(rows)
    first = np.repeat(rows[:-1], np.diff(ends))
    exceptions = np.stack((odd - first, length[odd], overlap[odd]), axis=1)
    # Each exception has three numbers, hence the factor of the edges.
    return codes.astype(np.uint8), exceptions.ravel().astype(np.int32), 3 * ends


def widen_spans(codes: Sequence[int] | IntArray, exceptions: Sequence[int] | IntArray) -> Spans:
    """Read what `narrow_spans` wrote.

    >>> widen_spans([4, 2, 1, 255], [3, 397, 0]).tolist()
    [[0, 2], [2, 3], [2, 3], [3, 400]]
    """
    code = np.asarray(codes, dtype=np.int64)
    length, overlap = code >> 1, code & 1
    # The code 255 reads as 127 and 1, until the exceptions overwrite it.
    if len(exceptions):
        token, *odd = np.asarray(exceptions, dtype=np.int64).reshape(-1, 3).T
        length[token], overlap[token] = odd
    # In column order, since starts and ends are searched each by itself.
    spans = np.empty((len(code), 2), np.int64, order="F")
    # Lengths add up to the ends; a start lies before the end by the token's whole width.
    length.cumsum(out=spans[:, 1])
    np.subtract(spans[:, 1], length + overlap, out=spans[:, 0])
    return spans


def align_segment(row: Mapping[str, Any]) -> Spans:
    """Map every student token of a segment, a row of `data.Segments`, to each teacher's tokens.

    Returns ranges int64 [K, S, 2] in a teacher's tokens of this segment, of which its start token
    is the first. The student's own special tokens are unmapped.
    """
    # ids      <s> t e x t </s>        tokens of the text have spans, those around it have none
    # spans        0 1 2 3
    student_spans = widen_spans(row["student_codes"], row["student_exceptions"])
    text = slice(1, 1 + len(student_spans))
    spans_by_teacher = _by_teacher(row)
    shape = (len(spans_by_teacher), len(row["student_ids"]), 2)
    ranges = np.full(shape, UNMAPPED, dtype=np.int64)
    for teacher, teacher_spans in enumerate(spans_by_teacher):
        if len(teacher_spans):
            teacher_ranges = find_ranges(student_spans, teacher_spans)
        else:
            # A row that has no spans of the teacher is mapped by index.
            tokens = row["teacher_counts"][teacher] - 1
            teacher_ranges = align_positions(len(student_spans), tokens)
        # The tokens of the text come after the start token.
        ranges[teacher, text] = teacher_ranges + (teacher_ranges != UNMAPPED)
    return ranges


def segment_shares(row: Mapping[str, Any], ranges: Spans) -> npt.NDArray[np.float32]:
    """Measure `covered_shares` of every student token of a segment, float32 [K, S, 3]."""
    student_spans = widen_spans(row["student_codes"], row["student_exceptions"])
    text = slice(1, 1 + len(student_spans))
    shares = np.ones((ranges.shape[0], ranges.shape[1], 3), np.float32)
    for teacher, teacher_spans in enumerate(_by_teacher(row)):
        # Ranges count the start token of the teacher, and its spans do not.
        text_ranges = ranges[teacher, text]
        without_start = np.where(text_ranges == UNMAPPED, UNMAPPED, text_ranges - 1)
        shares[teacher, text] = covered_shares(student_spans, teacher_spans, without_start)
    return shares


def _by_teacher(row: Mapping[str, Any]) -> list[Spans]:
    """Return the spans of each teacher's tokens in the text of a segment."""
    spans = widen_spans(row["teacher_codes"], row["teacher_exceptions"])
    parts = []
    first = 0
    for tokens in row["teacher_counts"]:
        # The start token of a teacher has no span.
        last = first + int(tokens) - 1
        parts.append(spans[first:last])
        first = last
    return parts
