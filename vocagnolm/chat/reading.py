r"""Tokens of a rendered conversation, tied to the characters that all models share.

    text of the conversation            W h y ? . N o .
                                       0       4 5     8
    rendered    <s> | User | : | ' Why' | ? | \n | Assistant | : | ' No' | . | </s>
    spans           [0, 0) ..    [0, 3)  [3, 4)  [4, 4) ..         [5, 7) [7, 8) [8, 8)

A token in a content has its characters there, one that begins or ends outside only those inside.
A template's has none: it stands where contents meet, and no range of tokens holds it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import Rendered

TrainOn = Literal["completions", "all"]
TRAIN_ON: tuple[TrainOn, ...] = get_args(TrainOn)

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """N tokens of a conversation, as one model reads it, behind the first one.

    Attributes:
        first, values: ids or, of an offline teacher, losses in nats.
        spans: int64 [N, 2], in characters of the conversation.
        labelled: int64 [R, 2], half-open ranges of the tokens that have labels.
        stops: by index of each answer, the tokens up to its end.
        trimmed: characters of contents that the template leaves out.
    """

    first: float
    values: npt.NDArray[np.int32] | npt.NDArray[np.float32]
    spans: IntArray
    labelled: IntArray
    stops: dict[int, int]
    trimmed: int

    def until(self, answer: int) -> "TurnTokens":
        """End it behind an answer."""
        stop = self.stops[answer]
        stops = {index: end for index, end in self.stops.items() if end <= stop}
        kept = (self.values[:stop], self.spans[:stop], self.labelled.clip(max=stop))
        return TurnTokens(self.first, *kept, stops, self.trimmed)


def read_tokens(
    conversation: Conversation,
    rendered: Rendered,
    values: npt.NDArray[np.int32] | npt.NDArray[np.float32],
    spans: IntArray,
    special: npt.NDArray[np.bool_] | None,
    train_on: TrainOn,
) -> TurnTokens | str:
    """Give the tokens of a rendered text the characters of the conversation, and labels.

    Takes the values [N] and spans [N, 2] of all tokens, which cover the text. The first is where
    the row starts, and has no loss. Given which tokens are special, the end of an answer has labels
    too, or with "all" every token; without, only contents have.

    Returns the reason where one token is a part of two contents.
    """
    places = rendered.places
    shown = np.flatnonzero(places[:, 0] < places[:, 1])
    # The first content that ends behind a token's start, and the begin of the one after that.
    after = places[shown, 1].searchsorted(spans[:, 0], side="right")
    begins = np.append(places[shown, 0], [np.iinfo(np.int64).max] * 2)
    if (begins[after + 1] < spans[:, 1]).any():
        return "one token is a part of two messages"
    inside = begins[after] < spans[:, 1]
    owner = np.append(shown, 0)[after]
    clipped = np.clip(spans, places[owner, 0, None], places[owner, 1, None])
    moved = clipped + (rendered.origins - places[:, 0])[owner, None]
    # A template's token stands behind the content before it, the first ones at 0.
    before = places[:, 0].searchsorted(spans[:, 0], side="right")
    at = np.append(0, conversation.ends)[before]
    found = np.where(inside[:, None], moved, at[:, None])
    ranges = _content_tokens(spans, places)
    if special is not None:
        ranges[:, 1] = _turn_ends(spans, ranges[:, 1], places, np.flatnonzero(special))
    # Counted behind the first token.
    ranges = np.maximum(ranges - 1, 0)
    answers, untrained = conversation.answers, [*conversation.untrained]
    labelled = ranges[answers]
    if train_on == "all":
        labelled = np.delete(ranges, untrained, axis=0)
        if special is not None:
            edges = [0, *ranges[untrained].ravel(), len(spans) - 1]
            labelled = np.reshape(edges, (-1, 2))
    stops = {index: int(ranges[index, 1]) for index in answers}
    rest = (values[1:], found[1:], labelled, stops, rendered.trimmed)
    return TurnTokens(values[0].item(), *rest)


def _content_tokens(spans: IntArray, places: IntArray) -> IntArray:
    """Find the tokens of every content, half-open ranges [n, 2]; none of an empty content."""
    first = spans[:, 1].searchsorted(places[:, 0], side="right")
    last = spans[:, 0].searchsorted(places[:, 1], side="left")
    return np.stack([np.where(places[:, 0] < places[:, 1], first, last), last], axis=1)


def _turn_ends(spans: IntArray, last: IntArray, places: IntArray, special: IntArray) -> IntArray:
    """Move the ends of contents behind the first special token before the next content, if any."""
    if not len(special):
        return last
    closing = np.minimum(
        spans[special, 1].searchsorted(places[:, 1], side="right"), len(special) - 1
    )
    token = special[closing]
    limit = np.append(places[1:, 0], np.iinfo(np.int64).max)
    closes = (spans[token, 1] > places[:, 1]) & (spans[token, 0] < limit)
    return np.where(closes, token + 1, last)
