"""Maps a teacher's losses to a student's tokens in NumPy: aggregated losses, or advantages.

`vocagnolm.guidance` does the same on batches in torch.
"""

import numpy as np
import numpy.typing as npt

from vocagnolm.conventions import UNMAPPED, IntArray, Spans

FloatArray = npt.NDArray[np.float64]


def aggregate_losses(
    teacher_losses: npt.ArrayLike,
    ranges: Spans,
    aggregation: str = "max",
    shares: npt.NDArray[np.float32] | None = None,
) -> FloatArray:
    """Return the teacher loss of every student token, Eq. (2), for choosing tokens of a corpus.

    Args:
        teacher_losses: [T], nats.
        ranges: int64 [N, 2], as `align_spans` gives them.
        aggregation: "max" (the paper's), "mean", "sum" or "share" (beyond the paper).
        shares: float32 [N, 3], as `covered_shares` gives them; for "share" only.

    Returns:
        float64 [N], NaN for unmapped tokens.

    Examples:
        >>> aggregate_losses([1.0, 3.0, 2.0], np.array([[0, 2], [2, 3], [-1, -1]])).tolist()
        [3.0, 2.0, nan]
    """
    losses = np.asarray(teacher_losses, np.float64)
    aggregated = np.full(len(ranges), np.nan)
    mapped = np.flatnonzero(ranges[:, 0] != UNMAPPED)
    first, last = ranges[mapped].T
    # `reduceat` reduces from each index to the next, so every second result is a range's. The zero
    # at the end allows a range to end after the last loss.
    padded = np.append(losses, 0.0)
    places = ranges[mapped].ravel()
    if aggregation == "max":
        aggregated[mapped] = np.maximum.reduceat(padded, places)[::2]
        return aggregated
    sums = np.add.reduceat(padded, places)[::2]
    if aggregation == "sum":
        aggregated[mapped] = sums
    elif aggregation == "mean":
        aggregated[mapped] = sums / (last - first)
    elif aggregation == "share" and shares is not None:
        # One share for the first token, one for all tokens between, and one for the last.
        first_losses = padded[first]
        last_losses = np.where(last - first > 1, padded[last - 1], 0.0)
        between = sums - first_losses - last_losses
        parts = np.stack([first_losses, between, last_losses], axis=1)
        aggregated[mapped] = (parts * shares[mapped]).sum(axis=1)
    else:
        raise ValueError(f"aggregation must be max, mean, sum, or share with shares: {aggregation}")
    return aggregated


def chunk_ends(ranges: Spans) -> IntArray:
    """Find the last student token of each chunk. All tokens must be mapped.

    A chunk is the smallest span that begins and ends between tokens of both models. No teacher
    token lies on both sides of its end, so it ends where the next range begins after the one
    before.

    >>> chunk_ends(np.array([[0, 1], [1, 2], [1, 3], [3, 4]])).tolist()
    [0, 2, 3]
    """
    is_end = np.append(ranges[1:, 0] >= ranges[:-1, 1], True)
    # Without tokens there are no chunks, and so no last one to append.
    return np.flatnonzero(is_end[: len(ranges)])


def chunk_credit(
    student_losses: npt.ArrayLike, teacher_losses: npt.ArrayLike, ranges: Spans
) -> FloatArray:
    """Return the advantage of every student token of a text that the student sampled.

    On-policy distillation samples a text from the student and lowers the reverse KL divergence from
    its teacher. If both split the text into different tokens, their boundaries meet only at the
    ends of chunks. The advantage is what is left of the token's chunk: the student's losses from
    this token on, minus the losses of the teacher tokens that end after it begins.

        A_i = sum of L_S(j), j >= i in the chunk, - sum of L_T(t), t >= ranges[i, 0] in the chunk

    A positive advantage means that the teacher finds the rest of the chunk more likely than the
    student does. With `loss = sum(stop_gradient(A_i) * L_S(i))`, the expected gradient over sampled
    texts is that of the chunk's reverse KL divergence. Losses that are shared among tokens in
    another way (`aggregate_losses`) are right for choosing tokens of a corpus, but wrong here: they
    move a student that already equals its teacher.

    Args:
        student_losses: [N], nats, of the tokens as they were sampled.
        teacher_losses: [T], nats, of the teacher's own tokens of the same text.
        ranges: int64 [N, 2], as `align_spans` gives them. Both models' end tokens must be among
            them (`add_end`), or the student learns to end its answers early.

    Returns:
        float64 [N], nats; 0.0 for unmapped tokens.

    Examples:
        >>> ranges = np.array([[0, 2], [1, 2]])  # the student |ab|cd|, the teacher |a|bcd|
        >>> chunk_credit([1.0, 2.0], [0.5, 4.0], ranges).tolist()
        [-1.5, -2.0]
    """
    student = np.asarray(student_losses, np.float64)
    teacher = np.asarray(teacher_losses, np.float64)
    if len(student) != len(ranges):
        raise ValueError(
            f"ranges must have a row for each of {len(student)} student losses, got {len(ranges)}"
        )
    credit = np.zeros(len(student))
    mapped = np.flatnonzero(ranges[:, 0] != UNMAPPED)
    first, last = ranges[mapped].T
    ends = chunk_ends(ranges[mapped])
    # The end of each token's chunk, and the last teacher token of that chunk.
    end = ends[ends.searchsorted(np.arange(len(mapped)))]
    teacher_end = last[end]
    # A sum from one token to another is a difference of prefix sums.
    student_sums = np.append(0.0, np.cumsum(student[mapped]))
    teacher_sums = np.append(0.0, np.cumsum(teacher))
    to_go = student_sums[end + 1] - student_sums[:-1]
    credit[mapped] = to_go - (teacher_sums[teacher_end] - teacher_sums[first])
    return credit


def add_end(spans: Spans, text: str) -> Spans:
    """Add a span for the end token, after the last character of the text.

    If it is called for both models, the student's end token is paired with the teacher's.

    >>> add_end(np.array([[0, 2], [2, 3]]), "abc").tolist()
    [[0, 2], [2, 3], [3, 4]]
    """
    return np.append(spans, [[len(text), len(text) + 1]], axis=0)
