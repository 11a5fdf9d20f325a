"""The guidance view: which tokens are trained, with both losses and the teacher's tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vocagnolm.alignment import align_segment, widen_spans
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.shell.io import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vocagnolm.collator import Batch
    from vocagnolm.guidance import TokenGuidance
    from vocagnolm.method import Method

Status = Literal["kept", "dropped", "unmapped", "unlabelled"]


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
    # If both losses were compared, a token is "kept" if W is at least a half, and "dropped"
    # otherwise. It is "unmapped" if there is no teacher loss, and "unlabelled" if nothing
    # predicts it, such as a start token.
    status: Status
    # W in Eq. (4), times the weight of its row or message, if the corpus has weights.
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
    """A segment of a document, and where it begins there."""

    text: str
    document: int
    start: int
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True)
class GuidanceView:
    """Everything that one page shows: student and teacher by name, and the method."""

    student: str
    teacher: str
    method: Method
    texts: tuple[TextView, ...] = ()

    @property
    def tokens(self) -> list[TokenView]:
        """The tokens of all texts."""
        tokens: list[TokenView] = []
        for text in self.texts:
            tokens += text.tokens
        return tokens


def view_tokens(
    segment: JsonObject,
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    batch: Batch,
    guidance: TokenGuidance,
) -> Iterator[TokenView]:
    """Yield the views of a segment's student tokens.

    Args:
        segment: a row of `data.Segments.rows`, with one teacher.
        text: its characters.
        tokenizer: the student's.
        batch: the segment alone.
        guidance: of the batch.
    """
    is_scored_T = batch["teacher_labels"][0] != IGNORED_LABEL
    teacher_losses = guidance.teacher_loss_BT[0].where(is_scored_T, math.nan).tolist()
    # A teacher's start token has no span, but ranges count it.
    pieces = [("", teacher_losses[0])]
    teacher_spans = widen_spans(segment["teacher_codes"], segment["teacher_exceptions"]).tolist()
    for position, (start, end) in enumerate(teacher_spans, 1):
        pieces.append((text[start:end], teacher_losses[position]))
    student_losses = guidance.student_loss_BS[0].tolist()
    aggregated_losses = guidance.teacher_loss_BS[0].tolist()
    has_label = guidance.valid_BS[0].tolist()
    is_mapped = guidance.mapped_BS[0].tolist()
    weights = guidance.weight_BS[0].tolist()
    trained_weights = weights
    if "weights" in batch:
        trained_weights = (guidance.weight_BS * batch["weights"])[0].tolist()
    ids = segment["student_ids"]
    # position   0      1 .. n          n + 1
    # token      <s>    of the text     </s>, only where the segment ends its document
    # Special tokens have no characters; those of a chat template are among the text's.
    spans = [[0, 0]]
    spans += widen_spans(segment["student_codes"], segment["student_exceptions"]).tolist()
    # The end of the text also bounds its last token.
    spans.append([len(text), len(text)])
    ranges = align_segment(segment)[0].tolist()
    # Characters before this index belong to a token that was already yielded.
    covered = 0
    for position, token in enumerate(ids):
        start, end = spans[position]
        first, last = ranges[position]
        if not has_label[position]:
            status: Status = "unlabelled"
        elif not is_mapped[position]:
            status = "unmapped"
        else:
            status = "kept" if weights[position] >= 0.5 else "dropped"
        characters = text[max(start, covered) : end]
        word = str(tokenizer.convert_ids_to_tokens(token))
        # A "▁" for which the text has no space has the characters of the next token
        # (docs/method.md, choices). They are shown with that token.
        if word == "▁":
            end = min(end, spans[position + 1][0])
        yield TokenView(
            text=word if start == end else characters,
            start=start,
            end=end,
            status=status,
            weight=trained_weights[position],
            student_loss_nats=student_losses[position] if has_label[position] else None,
            teacher_loss_nats=aggregated_losses[position]
            if status in ("kept", "dropped")
            else None,
            # The range of an unmapped token is (-1, -1), which selects no piece.
            pieces=tuple(pieces[first:last]),
        )
        covered = max(covered, end)
