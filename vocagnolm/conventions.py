"""Letters, constants and units that every module shares; imports nothing.

Tensor names carry their shape, one letter for each dimension:

    B  rows of a batch               V  tokens of a vocabulary
    S  positions of the student      D  hidden size
    T  positions of the teacher,     K  teachers, or rows of a tile
       or of any one model           N  rows, concatenated

Every loss is a natural logarithm, in nats, and stands at the token that is predicted. Ranges and
spans are half-open: [first, last) holds `first` and ends before `last`.
"""

import numpy as np
import numpy.typing as npt

# The column of documents in a corpus.
TEXT = "text"
# A position whose token has no loss: padding, and the first token of a segment.
IGNORED_LABEL = -100
# Both ends of the teacher range of a student token that no teacher token covers.
UNMAPPED = -1


class NonFiniteLoss(RuntimeError):  # noqa: N818 - the name says what was found, as StopIteration does
    """A model gives NaN or infinite losses; nothing can be ranked by them, so the run must stop."""


class SharedError(ValueError):
    """An error that all processes of a job raise and one reports."""


class TeacherAway(SharedError):  # noqa: N818 - as above
    """The server of a teacher stays away; the same run goes on when it is back."""


IntArray = npt.NDArray[np.int64]
# [N, 2], half-open, in characters (Unicode code points) of the text.
Spans = IntArray
