"""Token-level lexical alignment: which teacher tokens cover each student token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import UNMAPPED
from vocagnolm.spans import IntArray, Spans, find_disorder


def align_spans(student_spans: Spans, teacher_spans: Spans) -> Spans:
    """Find the teacher tokens behind every student token (Algorithm 1), in O(N log M).

    Two binary searches per student token: the first teacher token that ends after its start, and
    the last one that starts before its end. The tokens between are the smallest range of teacher
    tokens that covers the student token: all of its characters (an IoS of 100 %) where the
    teacher's spans have no gaps.

    Args:
        student_spans: int64 [N, 2], half-open spans of characters, as `encode` gives them.
        teacher_spans: int64 [M, 2], of the same text.

    Returns:
        int64 [N, 2], half-open ranges of teacher tokens; (-1, -1) where no teacher token covers any
        character of the student token.

    Raises:
        ValueError: starts or ends decrease, and the search would be silently wrong.

    Example:
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
    """Find what `align_spans` does, in spans that are known to be in order."""
    # text       a + b = c !
    # student    0 0 0 1 1 2        starts 0 3 5, ends 3 5 6
    # teacher    0 1 1 1 2          first that ends after a start: 0 1 3
    #                               first that does not start before an end: 2 3 3
    ranges = np.empty((len(student_spans), 2), dtype=np.int64)
    ranges[:, 0] = teacher_spans[:, 1].searchsorted(student_spans[:, 0], side="right")
    ranges[:, 1] = teacher_spans[:, 0].searchsorted(student_spans[:, 1], side="left")
    is_unmapped = ranges[:, 0] >= ranges[:, 1]
    # As a rule there is none, and the assignment would cost as much as a search.
    if np.count_nonzero(is_unmapped):
        ranges[is_unmapped] = UNMAPPED
    return ranges


def covered_shares(
    student_spans: Spans, teacher_spans: Spans, ranges: Spans
) -> npt.NDArray[np.float32]:
    """Measure the share of each teacher token's characters that lie in a student token.

    Of a range of `align_spans` all tokens but the first and the last lie inside the student token,
    so three numbers hold it: float32 [N, 3], for the first token, those between (one share, of
    their characters as a whole), and the last; 1.0 where there is none. A character that m student
    tokens share, as the bytes of an emoji do, counts 1 / m for each, so that the shares of a
    teacher token add up to 1 over the student tokens (decision 39 has the exception).

    >>> student, teacher = np.array([[0, 2], [2, 6]]), np.array([[0, 4], [4, 5], [5, 7]])
    >>> covered_shares(student, teacher, align_spans(student, teacher)).tolist()
    [[0.5, 1.0, 1.0], [0.5, 1.0, 0.5]]
    """
    shares = np.ones((len(ranges), 3), np.float32)
    if not len(teacher_spans):
        return shares
    # Most tokens hold all of their range; the others begin or end inside a teacher token, or share
    # a character with a neighbour.
    goes_back = student_spans[1:, 0] < student_spans[:-1, 1]
    is_part = np.append(goes_back, False) | np.append(False, goes_back)
    is_part |= teacher_spans[ranges[:, 0], 0] < student_spans[:, 0]
    is_part |= teacher_spans[np.maximum(ranges[:, 1] - 1, 0), 1] > student_spans[:, 1]
    part = np.flatnonzero(is_part & (ranges[:, 0] != UNMAPPED))
    # Measure text by what each character counts, 1 / (the student tokens that share it):
    #
    #     student      [0, 1)  [1, 2)  [1, 2)  [2, 4)      the middle two are bytes of one character
    #     characters     0       1       2       3
    #     counts         1      1/2      1       1
    #     position   0       1      1.5     2.5     3.5        before each character, and at the end
    characters = max(student_spans[-1, 1], teacher_spans[-1, 1]) + 1
    position = np.arange(characters, dtype=np.float64)
    if goes_back.any():
        begun, ended = (np.bincount(edge, minlength=characters) for edge in student_spans.T)
        sharing = (begun - ended).cumsum()[:-1]
        position[1:] = np.cumsum(1 / np.maximum(sharing, 1))
    (starts, ends), (first, last) = student_spans[part].T, ranges[part].T
    tokens = last - first
    parts = ((first, first, 1), (first + 1, last - 2, 3), (last - 1, last - 1, 2))
    for column, (a, b, fewest) in enumerate(parts):
        there = tokens >= fewest
        begin, end = teacher_spans[a[there], 0], teacher_spans[b[there], 1]
        inside = np.minimum(end, ends[there]), np.maximum(begin, starts[there])
        covered = position[inside[0]] - position[inside[1]]
        whole = np.maximum(end - begin, 1)
        shares[part[there], column] = np.where(end > begin, covered / whole, 1.0)
    return shares


def align_positions(student_tokens: int, teacher_tokens: int) -> Spans:
    """Map every student token to the teacher token of the same index (Boizard et al. 2025).

    >>> align_positions(3, 2).tolist()
    [[0, 1], [1, 2], [-1, -1]]
    """
    first = np.arange(student_tokens, dtype=np.int64)
    ranges = np.stack([first, first + 1], axis=-1)
    ranges[teacher_tokens:] = UNMAPPED
    return ranges


def narrow_spans(
    spans: Spans, edges: npt.ArrayLike | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32], IntArray]:
    """Write spans in about a byte each, as `widen_spans` reads them.

    They are those of one row, or of several, concatenated, with these edges. Returns (steps [N],
    jumps [3 J], edges of the rows in the jumps). A step is how far a token ends behind the one
    before. A token that does not begin where that one ends, as a byte of a shared character, or
    ends more than 255 behind it, has a jump: its index in the row, its start and its end counted
    from there.

    >>> narrow_spans(np.array([[0, 2], [2, 3], [2, 3], [3, 999]]))[:2]  # of [2, 3) two bytes
    (array([2, 1, 0, 0], dtype=uint8), array([  2,  -1,   0,   3,   0, 996], dtype=int32))
    """
    rows = np.asarray([0, len(spans)] if edges is None else edges)
    before = np.append(0, spans[:, 1])
    before[rows] = 0
    begin, step = (spans - before[:-1, None]).T
    odd = np.flatnonzero((begin != 0) | (step > np.iinfo(np.uint8).max))
    ends = odd.searchsorted(rows)
    first = np.repeat(rows[:-1], np.diff(ends))
    jumps = np.stack((odd - first, begin[odd], step[odd]), axis=1)
    steps = step.astype(np.uint8)
    steps[odd] = 0
    return steps, jumps.ravel().astype(np.int32), 3 * ends


def widen_spans(steps: Sequence[int] | IntArray, jumps: Sequence[int] | IntArray) -> Spans:
    """Read what `narrow_spans` wrote.

    >>> widen_spans([2, 1, 0, 0], [2, -1, 0, 3, 0, 996]).tolist()
    [[0, 2], [2, 3], [2, 3], [3, 999]]
    """
    step = np.array(steps, dtype=np.int64)
    # In column order, since starts and ends are searched each by itself.
    spans = np.empty((len(step), 2), np.int64, order="F")
    if len(jumps):
        token, begin, end = np.asarray(jumps, dtype=np.int64).reshape(-1, 3).T
        step[token] = end
    step.cumsum(out=spans[:, 1])
    np.subtract(spans[:, 1], step, out=spans[:, 0])
    if len(jumps):
        spans[token, 0] += begin
    return spans


def align_segment(row: Mapping[str, Any]) -> Spans:
    """Map every student token of a segment, a row of `data.Segments`, to each teacher's tokens.

    Returns ranges int64 [K, S, 2] in a teacher's tokens of this segment, of which its start token
    is the first. The student's own special tokens are unmapped.
    """
    # ids      <s> t e x t </s>        tokens of the text have spans, those around it have none
    # spans        0 1 2 3
    ours = widen_spans(row["student_steps"], row["student_jumps"])
    theirs = _by_teacher(row)
    ranges = np.full((len(theirs), len(row["student_ids"]), 2), UNMAPPED, dtype=np.int64)
    for mine, spans, tokens in zip(ranges, theirs, row["teacher_counts"], strict=True):
        # Kept without spans: mapped by index.
        found = find_ranges(ours, spans) if len(spans) else align_positions(len(ours), tokens - 1)
        # Behind the start token.
        mine[1 : 1 + len(ours)] = found + (found != UNMAPPED)
    return ranges


def segment_shares(row: Mapping[str, Any], ranges: Spans) -> npt.NDArray[np.float32]:
    """Measure `covered_shares` of every student token of a segment, float32 [K, S, 3]."""
    ours = widen_spans(row["student_steps"], row["student_jumps"])
    shares = np.ones((*ranges.shape[:2], 3), np.float32)
    text = slice(1, 1 + len(ours))
    for mine, found, spans in zip(shares, ranges, _by_teacher(row), strict=True):
        without_start = np.where(found[text] == UNMAPPED, UNMAPPED, found[text] - 1)
        mine[text] = covered_shares(ours, spans, without_start)
    return shares


def _by_teacher(row: Mapping[str, Any]) -> list[Spans]:
    """Return the spans of each teacher's tokens in the text of a segment."""
    spans = widen_spans(row["teacher_steps"], row["teacher_jumps"])
    parts, first = [], 0
    for tokens in row["teacher_counts"]:
        # Without its start token.
        last = first + int(tokens) - 1
        parts.append(spans[first:last])
        first = last
    return parts
