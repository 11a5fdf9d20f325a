"""The guidance view: which tokens are trained, with both losses and the teacher's tokens.

From a batch of packed sequences, the losses and weights of its tokens (`guidance.TokenGuidance`)
and the texts, `view_texts` makes plain data for pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from vocagnolm.alignment import align_segment, widen_spans
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.shell.io import JsonObject

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

    from vocagnolm.collator import Batch
    from vocagnolm.guidance import TokenGuidance
    from vocagnolm.method import Method

Status = Literal["kept", "dropped", "unmapped", "unlabelled"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class TokenView:
    """A student token and what was decided about it."""

    # The name of a token that stands for no characters. Any other token has the characters that no
    # token before it has: the second token of a character (byte fallback) has none.
    text: str
    # Its characters in the text, including shared ones. A special token has none, and neither has a
    # "▁" that the tokenizer put before the text.
    start: int
    end: int
    # If both losses were compared, a token is "kept" if its weight is at least a half, and
    # "dropped" otherwise. It is "unmapped" if there is no teacher loss, and "unlabelled" if nothing
    # predicts it, such as a start token.
    status: Status
    # W in Eq. (4).
    weight: float
    # None for an unlabelled token.
    student_loss_nats: float | None
    # Aggregated over the pieces, Eq. (2); None if there is none.
    teacher_loss_nats: float | None
    # The teacher tokens that cover its characters, if they are known, with text and loss in nats,
    # or NaN if a token was not scored. Tokens that each have a part of one character all have that
    # character.
    pieces: tuple[tuple[str, float], ...] = ()

    @property
    def is_special(self) -> bool:
        """True if it stands for no characters."""
        return self.start == self.end

    @property
    def excess_nats(self) -> float | None:
        """The student's loss minus the teacher's, by which tokens are ranked."""
        if self.student_loss_nats is None or self.teacher_loss_nats is None:
            return None
        return self.student_loss_nats - self.teacher_loss_nats


@dataclass(frozen=True)
class TextView:
    """A segment of a document, where it begins there, and its packed sequence."""

    text: str
    document: int
    start: int
    block: int
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True)
class GuidanceView:
    """Everything that one page shows: student and teacher by name, and the method."""

    student: str
    # One or more names.
    teacher: str
    method: Method
    # Among which tokens the share is taken, in words.
    competition: str
    texts: tuple[TextView, ...] = ()

    @property
    def tokens(self) -> list[TokenView]:
        """The tokens of all texts."""
        return [token for text in self.texts for token in text.tokens]


def view_texts(
    batch: Batch,
    guidance: TokenGuidance,
    segments: Sequence[Sequence[JsonObject]],
    corpus: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[TextView, ...]:
    """Make the views of a batch's segments. With several teachers, pieces are the first one's.

    `segments` has rows of `data.Segments.rows` for each row of the batch, and `corpus` their
    documents.
    """
    if "teacher_losses" in batch:
        scored_BT = ~batch["teacher_losses"].isnan()
    else:
        scored_BT = batch["teacher_labels"] != IGNORED_LABEL
    views = []
    for row, row_segments in enumerate(segments):
        # Each segment of the row takes its part of both iterators:
        #   tokens  segment 0 | segment 1 ...        losses  segment 0 | ... | other teachers
        decisions = iter(_decisions(guidance, row))
        losses = iter(guidance.teacher_loss_BT[row].where(scored_BT[row], math.nan).tolist())
        for segment in row_segments:
            document, start = segment["document"], segment["start"]
            text = corpus[document]["text"][start : segment["end"]]
            segment_decisions = itertools.islice(decisions, len(segment["student_ids"]))
            tokens = tuple(_tokens(segment, text, tokenizer, segment_decisions, losses))
            views.append(TextView(text, document, start, int(batch["block"][row]), tokens))
    return tuple(views)


class _Decision(NamedTuple):
    """What was decided about one student token, and why."""

    student_loss: float
    teacher_loss: float
    has_label: bool
    is_mapped: bool
    weight: float


def _decisions(guidance: TokenGuidance, row: int) -> list[_Decision]:
    """Return the decisions about the tokens of one row of a batch."""
    columns = zip(
        guidance.student_loss_BS[row].tolist(),
        guidance.teacher_loss_BS[row].tolist(),
        guidance.valid_BS[row].tolist(),
        guidance.mapped_BS[row].tolist(),
        guidance.weight_BS[row].tolist(),
        strict=True,
    )
    return [_Decision(*values) for values in columns]


def _tokens(
    segment: JsonObject,
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    decisions: Iterable[_Decision],
    losses: Iterator[float],
) -> Iterator[TokenView]:
    """Yield the views of a segment's tokens, and take its teacher tokens' losses from `losses`."""
    ids = segment["student_ids"]
    # position   0      1 .. n          n + 1
    # token      <s>    of the text     </s>, only where the segment ends its document
    # Special tokens have no characters; those of a chat template are among the text's.
    spans = [[0, 0]]
    spans += widen_spans(segment["student_codes"], segment["student_exceptions"]).tolist()
    if len(spans) < len(ids):
        spans.append([len(text), len(text)])
    # The spans of all teachers follow each other. A teacher's start token has no span, but ranges
    # count it.
    teacher_spans = widen_spans(segment["teacher_codes"], segment["teacher_exceptions"]).tolist()
    pieces = [("", next(losses))]
    for start, end in teacher_spans[: segment["teacher_counts"][0] - 1]:
        pieces.append((text[start:end], next(losses)))
    ranges = align_segment(segment)[0].tolist()
    # Characters before this index belong to a token that was already yielded.
    covered = 0
    next_starts = [start for start, _ in spans[1:]] + [len(text)]
    rows = zip(ids, spans, next_starts, ranges, decisions, strict=True)
    for token, (start, end), next_start, (first, last), decision in rows:
        is_compared = decision.has_label and decision.is_mapped
        if not decision.has_label:
            status: Status = "unlabelled"
        elif not decision.is_mapped:
            status = "unmapped"
        else:
            status = "kept" if decision.weight >= 0.5 else "dropped"
        characters = text[max(start, covered) : end]
        word = str(tokenizer.convert_ids_to_tokens(token))
        # A "▁" for which the text has no space has the characters of the next token
        # (docs/method.md, choices). They are shown with that token.
        if word == "▁":
            end = min(end, next_start)
        yield TokenView(
            text=word if start == end else characters,
            start=start,
            end=end,
            status=status,
            weight=decision.weight,
            student_loss_nats=decision.student_loss if decision.has_label else None,
            teacher_loss_nats=decision.teacher_loss if is_compared else None,
            # The range of an unmapped token is (-1, -1), which selects no piece.
            pieces=tuple(pieces[first:last]),
        )
        covered = max(covered, end)
