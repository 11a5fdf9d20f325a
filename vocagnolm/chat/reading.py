r"""Conversations as a tokenizer reads them in a chat template, shortened to fit all contexts.

    text of the conversation            W h y ? . N o .
                                       0       4 5     8
    rendered    <s> | User | : | ' Why' | ? | \n | Assistant | : | ' No' | . | </s>
    spans           [0, 0) ..    [0, 3)  [3, 4)  [4, 4) ..         [5, 7) [7, 8) [8, 8)

A token of a content has the characters that it covers there. If it begins or ends outside the
content, only the characters inside count. A token of the template has no characters. Its empty span
lies where two contents meet, so no range of tokens contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from vocagnolm.chat.formats import Conversation
from vocagnolm.chat.render import Rendered
from vocagnolm.conventions import IntArray
from vocagnolm.spans import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["completions", "all"]
TRAIN_ON: tuple[TrainOn, ...] = get_args(TrainOn)
_NO_ANSWER = "no answer of an assistant to train on"
# No text has a character there.
_FAR_AWAY = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class TurnTokens:
    """The N tokens of a conversation as one model reads it, without the first token of the row.

    Attributes:
        first, values: ids or, of an offline teacher, losses in nats.
        spans: int64 [N, 2], in characters of the conversation.
        labelled: int64 [R, 2], half-open ranges of the tokens that have labels.
        stops: by index of each answer, the tokens up to its end.
        trimmed: characters of contents that the template leaves out.
        weights: [R], of the corpus, for the tokens of each labelled range.
    """

    first: float
    values: npt.NDArray[np.int32] | npt.NDArray[np.float32]
    spans: IntArray
    labelled: IntArray
    stops: dict[int, int]
    trimmed: int
    weights: npt.NDArray[np.floating]

    def until(self, answer: int) -> TurnTokens:
        """Drop the tokens after the end of an answer."""
        stop = self.stops[answer]
        return replace(
            self,
            values=self.values[:stop],
            spans=self.spans[:stop],
            # A range after the stop becomes [stop, stop), which holds no token.
            labelled=self.labelled.clip(max=stop),
        )


def read_tokens(
    conversation: Conversation,
    rendered: Rendered,
    values: npt.NDArray[np.int32] | npt.NDArray[np.float32],
    spans: IntArray,
    special: npt.NDArray[np.bool_] | None,
    train_on: TrainOn,
) -> TurnTokens | str:
    """Map a rendered text's tokens to characters of the conversation, and find the labelled ones.

    Takes the values [N] and spans [N, 2] of all tokens, which cover the text. The first token
    starts the row and has no loss. By default only contents have labels. With the `special` ids,
    the end of an answer has labels, too. With "all", every token has one.

    Returns a reason if one token is part of two contents.
    """
    conversation_spans = _move_spans(conversation, rendered, spans)
    if conversation_spans is None:
        return "one token is a part of two messages"
    places = rendered.places
    has_text = places[:, 0] < places[:, 1]
    # The tokens of a content end after it begins and begin before it ends. An empty content gets an
    # empty range.
    first = spans[:, 1].searchsorted(places[:, 0], side="right")
    last = spans[:, 0].searchsorted(places[:, 1], side="left")
    ranges = np.stack([np.where(has_text, first, last), last], axis=1)
    if special is not None:
        ranges[:, 1] = _turn_ends(spans, ranges[:, 1], places, np.flatnonzero(special))
    # From here on, positions do not count the first token of the row. If a content contains that
    # token, it loses it.
    ranges = np.maximum(ranges - 1, 0)
    row_weight, weights = _weights(conversation)
    trained = np.array(conversation.answers, np.int64)
    if train_on == "all":
        trained = np.flatnonzero(weights)
    if train_on == "all" and special is not None:
        # All tokens have labels, but a range ends where the weight changes. Ranges of weight 0 are
        # left out, here those of two untrained answers, [b, c) and [d, e):
        #
        #     tokens     0 . . . b . . c . . . . d . . e . . N - 1
        #     labelled   [-------)     [---------)     [---------)
        changing = np.flatnonzero(weights != 1)
        edges = [0]
        edges += ranges[changing].ravel().tolist()
        edges.append(len(spans) - 1)
        ranges_weights = np.ones(len(edges) - 1)
        ranges_weights[1::2] = weights[changing]
        labelled = np.stack([edges[:-1], edges[1:]], axis=1)[ranges_weights != 0]
        weights = ranges_weights[ranges_weights != 0]
    else:
        labelled, weights = ranges[trained], weights[trained]
    stops = {}
    for answer in conversation.answers:
        stops[answer] = int(ranges[answer, 1])
    return TurnTokens(
        first=values[0].item(),
        values=values[1:],
        spans=conversation_spans[1:],
        labelled=labelled,
        stops=stops,
        trimmed=rendered.trimmed,
        weights=row_weight * weights,
    )


def _weights(conversation: Conversation) -> tuple[float, npt.NDArray[np.float64]]:
    """Return the weight of a conversation, and the weights of its messages."""
    if conversation.weights:
        return conversation.weights[0], np.array(conversation.weights[1:])
    weights = np.ones(len(conversation.roles))
    weights[list(conversation.untrained)] = 0.0
    return 1.0, weights


def _move_spans(conversation: Conversation, rendered: Rendered, spans: IntArray) -> IntArray | None:
    """Move the spans [N, 2] of tokens from the rendered text to the conversation's text.

    Returns None if one token is part of two contents.
    """
    # Binary searches place all tokens at once, without a loop. Empty contents are not searched,
    # because no token can have a character of them.
    places = rendered.places
    filled = np.flatnonzero(places[:, 0] < places[:, 1])
    # A token's candidate is the first content that ends after the token starts. If the next content
    # begins before the token ends, the token has characters of both. Two extra entries stand for
    # the missing contents after the last one.
    candidate = places[filled, 1].searchsorted(spans[:, 0], side="right")
    begins = np.append(places[filled, 0], [_FAR_AWAY] * 2)
    if (begins[candidate + 1] < spans[:, 1]).any():
        return None
    # The candidate ends after the token starts. If it also begins before the token ends, they
    # overlap. Otherwise the token belongs to the template. Without a candidate, the owner is not
    # used.
    is_inside = begins[candidate] < spans[:, 1]
    owner = np.append(filled, 0)[candidate]
    # Only the characters inside the content count. They are moved from the rendered text to the
    # conversation's text.
    clipped = np.clip(spans, places[owner, 0, None], places[owner, 1, None])
    moved = clipped + (rendered.origins - places[:, 0])[owner, None]
    # A template token gets an empty span at the end of the content before it, or at 0.
    contents_before = places[:, 0].searchsorted(spans[:, 0], side="right")
    standing_place = np.append(0, conversation.ends)[contents_before]
    return np.where(is_inside[:, None], moved, standing_place[:, None])


def _turn_ends(spans: IntArray, last: IntArray, places: IntArray, special: IntArray) -> IntArray:
    """Move each content's end after the first special token before the next content, if any."""
    if not len(special):
        return last
    # The first special token that ends after each content, as an index into `special`. If there is
    # none, the last one stands in, and the test below rejects it.
    closing = spans[special, 1].searchsorted(places[:, 1], side="right")
    token = special[np.minimum(closing, len(special) - 1)]
    # A special token after the next content begins does not end this one.
    next_content = np.append(places[1:, 0], _FAR_AWAY)
    closes = (spans[token, 1] > places[:, 1]) & (spans[token, 0] < next_content)
    return np.where(closes, token + 1, last)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> IntArray:
    """Return the ids of all special tokens, including those without a name of their own."""
    ids = set(tokenizer.all_special_ids)
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            ids.add(index)
    return np.array(sorted(ids), np.int64)


class FittedTurns(NamedTuple):
    """A conversation that ends after its last answer that fits, as every model reads it.

    `end` is its last character. `left_out` has the messages that were dropped.
    """

    document: int
    reads: list[TurnTokens]
    end: int
    left_out: int


def fit_turns(
    document: int,
    conversation: Conversation,
    models: Sequence[TurnTokens | str],
    limits: Sequence[int],
) -> FittedTurns | str:
    """Shorten what every model reads to its limit of tokens, or return why nothing fits."""
    # If one model cannot read a conversation, no model gets it.
    reads = []
    for tokens in models:
        if isinstance(tokens, str):
            return tokens
        reads.append(tokens)
    last = len(conversation.roles) - 1
    lengths = [len(tokens.spans) for tokens in reads]
    if np.greater(lengths, limits).any():
        # Answers come in order, so the last one that fits remains. All models stop after the same
        # answer, because their tokens must have the same text.
        last = -1
        for answer in reads[0].stops:
            ends = [tokens.stops[answer] for tokens in reads]
            if not np.greater(ends, limits).any():
                last = answer
        if last < 0:
            return "its first answer alone exceeds a context" if reads[0].stops else _NO_ANSWER
        reads = [tokens.until(last) for tokens in reads]
    if not np.diff(reads[0].labelled).any():
        return _NO_ANSWER
    left_out = len(conversation.roles) - 1 - last
    return FittedTurns(document, reads, conversation.ends[last], left_out)


def join_turns(reads: Sequence[TurnTokens]) -> Tokens:
    """Concatenate the tokens of a model, and turn the losses of unlabelled tokens into NaN."""
    values = []
    spans = []
    first_values = []
    for tokens in reads:
        # A store has losses of template tokens, too, but they say nothing about a content. All ids
        # are needed, because the model reads them.
        has_ids = tokens.values.dtype.kind == "i"
        values.append(tokens.values if has_ids else _masked_losses(tokens))
        spans.append(tokens.spans)
        first_values.append(tokens.first)
    dtype = values[0].dtype.name if values else "int32"
    all_tokens = Tokens.join(values, spans, dtype)
    return replace(all_tokens, start=np.array(first_values))


def turn_columns(fitted: Sequence[FittedTurns]) -> dict[str, Any]:
    """Make the columns that only conversations have: integers, or arrays as (edges, values)."""
    documents = []
    left_out = []
    trimmed = []
    student_reads = []
    teacher_reads = []
    for turns in fitted:
        documents.append(turns.document)
        left_out.append(turns.left_out)
        trimmed.append(sum(tokens.trimmed for tokens in turns.reads))
        # The student comes first, then the teachers.
        student_reads.append(turns.reads[:1])
        teacher_reads.append(turns.reads[1:])
    return {
        "document": np.array(documents, np.int64),
        "left_out_messages": np.array(left_out, np.int64),
        "trimmed_characters": np.array(trimmed, np.int64),
        "student_labelled": _labelled_ranges(student_reads),
        "teacher_labelled": _labelled_ranges(teacher_reads),
        "student_weights": _range_weights(fitted),
    }


def _range_weights(fitted: Sequence[FittedTurns]) -> tuple[IntArray, npt.NDArray[np.floating]]:
    """Return the weights of the student's labelled ranges that have tokens."""
    edges = [0]
    weights: list[npt.NDArray[np.floating]] = [np.empty(0)]
    for turns in fitted:
        tokens = turns.reads[0]
        has_tokens = tokens.labelled[:, 0] < tokens.labelled[:, 1]
        weights.append(tokens.weights[has_tokens])
        edges.append(edges[-1] + len(weights[-1]))
    return np.array(edges), np.concatenate(weights)


def _masked_losses(tokens: TurnTokens) -> npt.NDArray[np.float32]:
    """Return the losses of tokens, with NaN for tokens without a label."""
    losses = np.full(len(tokens.values), np.nan, np.float32)
    for first, last in tokens.labelled.tolist():
        losses[first:last] = tokens.values[first:last]
    return losses


def _labelled_ranges(rows: Sequence[Sequence[TurnTokens]]) -> tuple[IntArray, IntArray]:
    """Find the labelled ranges of all models in a row, in which each model has a start token."""
    edges = [0]
    flat_ranges = [np.empty(0, np.int64)]
    for reads in rows:
        # A row has the tokens of one model after the other, each after its start token:
        #
        #     row      <s> t t t t t   <s> t t t
        #     start        1               7
        ranges = [np.empty((0, 2), np.int64)]
        start = 1
        for tokens in reads:
            ranges.append(tokens.labelled + start)
            start += len(tokens.spans) + 1
        row = np.concatenate(ranges)
        row = row[row[:, 0] < row[:, 1]].ravel()
        if reads and not len(row):
            # A row without ranges would mean that all tokens have labels. The start token has no
            # loss, so a range with only that token labels nothing.
            row = np.array([0, 1])
        # Row i of the column is the values from edges[i] up to edges[i + 1].
        edges.append(edges[-1] + len(row))
        flat_ranges.append(row)
    return np.array(edges), np.concatenate(flat_ranges)
