"""The guidance view: which tokens of a text are trained, with both losses and the teacher's pieces.

From a batch of packed sequences, the losses and weights of its tokens (`guidance.TokenGuidance`)
and the texts, `view_texts` makes plain data, which pages show.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from vocagnolm.alignment import align_segment, widen_spans
from vocagnolm.conventions import IGNORED_LABEL
from vocagnolm.io import JsonObject

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
    """A student token and what became of it."""

    # The name of a token that stands for no characters, else the characters that no token before
    # it shows: the second token of a character (byte fallback) shows none.
    text: str
    # Its characters in the text, shared ones included; none for a special token, and for a "▁" that
    # the tokenizer put before the text.
    start: int
    end: int
    # "kept", from a weight of a half on, or "dropped" where both losses were compared, "unmapped"
    # where there is no teacher loss to compare with, "unlabelled" where nothing
    # predicts it, as a start token.
    status: Status
    # W of Eq. (4).
    weight: float
    # None where unlabelled.
    student_loss_nats: float | None
    # Aggregated over its pieces, Eq. (2); None where there is none.
    teacher_loss_nats: float | None
    # The teacher tokens that cover its characters, if they are known: text and loss in nats, NaN
    # where it was not scored. Those that hold parts of one character all have that character.
    pieces: tuple[tuple[str, float], ...] = ()

    @property
    def is_special(self) -> bool:
        """True if it stands for no characters."""
        return self.start == self.end

    @property
    def excess_nats(self) -> float | None:
        """The student's loss less the teacher's, by which tokens are ranked."""
        if self.student_loss_nats is None or self.teacher_loss_nats is None:
            return None
        return self.student_loss_nats - self.teacher_loss_nats


@dataclass(frozen=True)
class TextView:
    """A segment of a document, its begin there, and the packed sequence that it is in."""

    text: str
    document: int
    start: int
    block: int
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True)
class GuidanceView:
    """All that one page shows: student and teacher by name, and the method between them."""

    student: str
    # One name, or those of several.
    teacher: str
    method: Method
    # Tokens among which the share is taken, in words.
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
    """Make the views of a batch's segments; of several teachers the pieces are the first one's.

    `segments` has rows of `data.Segments.rows` for each row of the batch, `corpus` their documents.
    """
    if "teacher_losses" in batch:
        scored_BT = ~batch["teacher_losses"].isnan()
    else:
        scored_BT = batch["teacher_labels"] != IGNORED_LABEL
    views = []
    for row, of_row in enumerate(segments):
        # Each segment of the row takes its part of both iterators:
        #   tokens  segment 0 | segment 1 ...        losses  segment 0 | ... | of other teachers
        found = zip(*(values_BS[row].tolist() for values_BS in guidance[:5]), strict=True)
        losses = iter(guidance.teacher_loss_BT[row].where(scored_BT[row], math.nan).tolist())
        for segment in of_row:
            document, start = segment["document"], segment["start"]
            text = corpus[document]["text"][start : segment["end"]]
            own = itertools.islice(found, len(segment["student_ids"]))
            tokens = tuple(_tokens(segment, text, tokenizer, own, losses))
            views.append(TextView(text, document, start, int(batch["block"][row]), tokens))
    return tuple(views)


def _tokens(
    segment: JsonObject,
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    found: Iterable[tuple[float, float, bool, bool, float]],
    losses: Iterator[float],
) -> Iterator[TokenView]:
    ids = segment["student_ids"]
    # position   0      1 .. n          n + 1
    # token      <s>    of the text     </s>, behind a document's end only
    # Special tokens have no characters; those of a chat template are among the text's.
    ours = widen_spans(segment["student_codes"], segment["student_exceptions"]).tolist()
    spans = [[0, 0], *ours, *[[len(text)] * 2] * (len(ids) - 1 - len(ours))]
    # The first teacher's, behind its start token, which ranges count and no token shows.
    theirs = widen_spans(segment["teacher_codes"], segment["teacher_exceptions"]).tolist()
    theirs = theirs[: segment["teacher_counts"][0] - 1]
    pieces = []
    for start, end in [[0, 0], *theirs]:
        pieces.append((text[start:end], next(losses)))
    ranges = align_segment(segment)[0].tolist()
    shown = 0
    following = [*(start for start, _ in spans[1:]), len(text)]
    rows = zip(ids, spans, following, ranges, found, strict=True)
    for token, (start, end), behind, (first, last), numbers in rows:
        student_loss, teacher_loss, has_label, is_mapped, weight = numbers
        status: Status = "kept" if weight >= 0.5 else "dropped"
        if not (has_label and is_mapped):
            status = "unmapped" if has_label else "unlabelled"
        name, word = text[max(start, shown) : end], str(tokenizer.convert_ids_to_tokens(token))
        # Where no space is, it has the characters of the next token (docs/method.md, choices).
        if word == "▁":
            end = min(end, behind)
        yield TokenView(
            word if start == end else name,
            start,
            end,
            status,
            weight=weight,
            student_loss_nats=student_loss if has_label else None,
            teacher_loss_nats=teacher_loss if has_label and is_mapped else None,
            # None for an unmapped token: its range is empty.
            pieces=tuple(pieces[first:last]),
        )
        shown = max(shown, end)
