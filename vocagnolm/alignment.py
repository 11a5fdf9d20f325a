"""Token-level lexical alignment: which teacher tokens cover each student token."""

import numpy as np

from vocagnolm.conventions import UNMAPPED
from vocagnolm.spans import Spans, find_disorder


def align_spans(student_spans: Spans, teacher_spans: Spans) -> Spans:
    """Find the teacher tokens behind every student token (Algorithm 1), in O(N log M).

    Two binary searches per student token: the first teacher token that ends after its start, and
    the last one that starts before its end. The tokens between are the smallest range of teacher
    tokens that covers the student token: all of its characters (an IoS of 100 %) where the
    teacher's spans have no gaps. An empty student span, of which `fill_gaps` leaves none, is mapped
    only where it lies inside a teacher token.

    Takes spans int64 [N, 2] and [M, 2] of the same text, starts and ends each non-decreasing (else
    a ValueError: the search would be silently wrong). Returns int64 [N, 2], half-open ranges of
    teacher tokens; (-1, -1) where no teacher token covers any character of the student token.

    >>> student = np.array([[0, 3], [3, 5], [5, 6]])  # "a+b", "=c", "!"
    >>> teacher = np.array([[0, 1], [1, 4], [4, 5]])  # "a", "+b=", "c"
    >>> align_spans(student, teacher).tolist()
    [[0, 2], [1, 3], [-1, -1]]
    """
    for name, spans in (("student", student_spans), ("teacher", teacher_spans)):
        wrong = find_disorder(spans)
        if wrong is not None:
            raise ValueError(
                f"{name} spans must be in the order of the text, found {spans[wrong].tolist()} at"
                f" token {wrong}: encode without special tokens, whose spans are (0, 0)"
            )
    # text       a + b = c !
    # student    0 0 0 1 1 2        starts 0 3 5, ends 3 5 6
    # teacher    0 1 1 1 2          first that ends after a start: 0 1 3
    #                               first that does not start before an end: 2 3 3
    ranges = np.empty((len(student_spans), 2), dtype=np.int64)
    ranges[:, 0] = teacher_spans[:, 1].searchsorted(student_spans[:, 0], side="right")
    ranges[:, 1] = teacher_spans[:, 0].searchsorted(student_spans[:, 1], side="left")
    ranges[ranges[:, 0] >= ranges[:, 1]] = UNMAPPED
    return ranges


def align_positions(student_tokens: int, teacher_tokens: int) -> Spans:
    """Map every student token to the teacher token of the same number, whatever it reads.

    As the first ULD implementation pairs positions (Boizard et al. 2025); the rest of the longer
    text is left over.

    >>> align_positions(3, 2).tolist()
    [[0, 1], [1, 2], [-1, -1]]
    """
    first = np.arange(student_tokens, dtype=np.int64)
    ranges = np.stack([first, first + 1], axis=-1)
    ranges[teacher_tokens:] = UNMAPPED
    return ranges
