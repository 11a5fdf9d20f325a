"""The guidance view: which tokens of a text are trained, with both losses and the teacher's pieces.

From a batch of packed sequences, the losses and weights of its tokens (`guidance.TokenGuidance`)
and the texts, `view_rows` makes plain data, which pages show, for the command and the training
callback alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np

from vocagnolm.alignment import align_segment, widen_spans
from vocagnolm.conventions import UNMAPPED
from vocagnolm.io import JsonObject
from vocagnolm.spans import Spans

if TYPE_CHECKING:
    import datasets

    from vocagnolm.guidance import TokenGuidance
    from vocagnolm.method import Method
    from vocagnolm.packing import Batch, Block, Blocks
    from vocagnolm.readers import Reader

Status = Literal["kept", "dropped", "unmapped", "unlabelled"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class PieceView:
    """A teacher token behind a student token, its characters in the text, and the teacher's loss.

    Tokens that hold parts of one character all have that character.
    """

    text: str
    start: int
    end: int
    loss_nats: float


@dataclass(frozen=True)
class TokenView:
    """A student token and what became of it."""

    # The name of a special token, else the characters that no token before it shows: the second
    # token of a character (byte fallback) shows none.
    text: str
    # Its characters in the text, shared ones included; none for a special token.
    start: int
    end: int
    # "kept" or "dropped" where both losses were compared, "unmapped" where there is no teacher loss
    # to compare with, "unlabelled" where nothing predicts it, as a start token.
    status: Status
    # True if its weight in the loss is not 0.
    is_trained: bool
    # None where unlabelled.
    student_loss_nats: float | None
    # Aggregated over its pieces, Eq. (2); None where there is none.
    teacher_loss_nats: float | None
    # The teacher tokens that cover its characters, if they are known.
    pieces: tuple[PieceView, ...] = ()

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
class ViewSettings:
    """Names of student and teacher, and the method between them."""

    student: str
    # One name, or those of several.
    teacher: str
    method: Method
    # Tokens among which the share is taken, in words.
    competition: str
    # Optimizer steps of the student, where a training run shows itself.
    step: int | None = None


@dataclass(frozen=True)
class GuidanceView:
    """All that one page shows."""

    settings: ViewSettings
    texts: tuple[TextView, ...]

    @property
    def tokens(self) -> list[TokenView]:
        """The tokens of all texts."""
        return [token for text in self.texts for token in text.tokens]


@dataclass(frozen=True, eq=False)
class SegmentText:
    """A segment in characters."""

    text: str
    document: int
    # Begin in the document.
    start: int
    # Names of the special tokens, by position among the student's N tokens.
    specials: Mapping[int, str]
    # int64 [N, 2], characters of the student's tokens; none for special ones.
    spans: Spans
    # int64 [M, 2], characters of the teacher's text tokens.
    teacher_spans: Spans
    # int64 [N, 2], half-open ranges of those behind each student token.
    ranges: Spans


class Sample(NamedTuple):
    """A batch to look at again and again, and the segments of each of its rows."""

    batch: Batch
    rows: Sequence[Sequence[SegmentText]]


def sample_blocks(
    blocks: Blocks,
    indices: Sequence[int],
    collate: Callable[[Sequence[Block]], Batch],
    segments: datasets.Dataset,
    corpus: datasets.Dataset,
    student: Reader,
) -> Sample:
    """Read some packed sequences as the trainer does, and the texts of their segments."""
    rows = []
    for index in indices:
        found = [segments[int(row)] for row in blocks.segments(index)]
        rows.append([read_segment(segment, corpus, student) for segment in found])
    return Sample(collate([blocks[index] for index in indices]), rows)


def read_segment(row: JsonObject, corpus: datasets.Dataset, student: Reader) -> SegmentText:
    """Find the characters of the tokens of a segment, a row of `data.Segments.rows`."""
    text = corpus[row["document"]]["text"][row["start"] : row["end"]]
    ids = row["student_ids"]
    ours = widen_spans(row["student_steps"], row["student_jumps"])
    # position   0      1 .. last - 1   last ..
    # token      <s>    of the text     </s>, behind a document's end only
    # Those of a chat template are among the text's, and have no characters.
    last = 1 + len(ours)
    ends = np.full((len(ids) - last, 2), len(text))
    # The first teacher's. Ranges count its start token, which has no span.
    theirs = widen_spans(row["teacher_steps"], row["teacher_jumps"])
    theirs = theirs[: row["teacher_counts"][0] - 1]
    both = align_segment(row)[0]
    ranges = np.where(both == UNMAPPED, UNMAPPED, both - 1)
    of_template = 1 + np.flatnonzero(ours[:, 0] == ours[:, 1])
    special = (0, *of_template.tolist(), *range(last, len(ids)))
    names = student.tokenizer.convert_ids_to_tokens([ids[position] for position in special])
    return SegmentText(
        text=text,
        document=row["document"],
        start=row["start"],
        specials=dict(zip(special, names, strict=True)),
        spans=np.concatenate([np.zeros((1, 2), np.int64), ours, ends]),
        teacher_spans=theirs,
        ranges=ranges,
    )


def view_rows(
    batch: Batch, guidance: TokenGuidance, rows: Sequence[Sequence[SegmentText]]
) -> tuple[TextView, ...]:
    """Make the views of a batch's segments; of several teachers the pieces are the first one's."""
    columns = (
        guidance.student_loss_BS,
        guidance.teacher_loss_BS,
        guidance.valid_BS,
        guidance.mapped_BS,
        guidance.weight_BS.bool(),
    )
    views = []
    for row, segments in enumerate(rows):
        # Each segment of the row takes its part of both iterators:
        #   tokens  segment 0 | segment 1 ...        losses  segment 0 | ... | of other teachers
        tokens = zip(*(column[row].tolist() for column in columns), strict=True)
        losses = iter(guidance.teacher_loss_BT[row].tolist())
        block = int(batch["block"][row])
        for segment in segments:
            found = itertools.islice(tokens, len(segment.spans))
            views.append(_view(segment, block, found, losses))
    return tuple(views)


def _view(
    segment: SegmentText,
    block: int,
    found: Iterable[tuple[float, float, bool, bool, bool]],
    piece_losses: Iterator[float],
) -> TextView:
    text, pieces = segment.text, []
    if len(segment.teacher_spans):
        # The loss of its start token, which no piece shows.
        next(piece_losses)
        for start, end in segment.teacher_spans.tolist():
            pieces.append(PieceView(text[start:end], start, end, next(piece_losses)))
    tokens: list[TokenView] = []
    shown = 0
    rows = zip(found, segment.spans.tolist(), segment.ranges.tolist(), strict=True)
    for position, (numbers, (start, end), (first, last)) in enumerate(rows):
        student_loss, teacher_loss, has_label, is_mapped, is_trained = numbers
        status: Status = "kept" if is_trained else "dropped"
        if not (has_label and is_mapped):
            status = "unmapped" if has_label else "unlabelled"
        tokens.append(
            TokenView(
                text=segment.specials.get(position, text[max(start, shown) : end]),
                start=start,
                end=end,
                status=status,
                is_trained=is_trained,
                student_loss_nats=student_loss if has_label else None,
                teacher_loss_nats=teacher_loss if has_label and is_mapped else None,
                pieces=() if first == UNMAPPED else tuple(pieces[first:last]),
            )
        )
        shown = end
    return TextView(text, segment.document, segment.start, block, tuple(tokens))
