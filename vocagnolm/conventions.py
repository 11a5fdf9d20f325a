"""Letters, constants and units that all modules share. Imports nothing.

Tensor names carry their shape, one letter for each dimension:

    B  rows of a batch               V  tokens of a vocabulary
    S  positions of the student      D  hidden size
    T  positions of the teacher,     K  teachers, or rows of a tile
       or of any one model           N  rows, concatenated

A block is a packed sequence: whole segments, one after the other, in one row of a batch. Public
names say `Block`, and everything else says packed sequence, or sequence.

Every loss is a natural logarithm, in nats, and has the index of the predicted token. Ranges and
spans are half-open: [first, last) includes `first` and excludes `last`.
"""

import numpy as np
import numpy.typing as npt

# The column that holds a corpus's documents.
TEXT = "text"
# The label of a token without a loss: padding, or the first token of a segment.
IGNORED_LABEL = -100
# Both ends of the teacher range of a student token that no teacher token covers.
UNMAPPED = -1


class NonFiniteLoss(RuntimeError):  # noqa: N818 - the name says what was found, as StopIteration does
    """A model gives NaN or infinite losses, by which nothing can be ranked. The run must stop."""


class SharedError(ValueError):
    """An error that all processes of a job raise, and that one of them reports."""


IntArray = npt.NDArray[np.int64]
# [N, 2], half-open, in characters (Unicode code points) of the text.
Spans = IntArray
