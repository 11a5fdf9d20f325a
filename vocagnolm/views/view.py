"""The guidance view: which tokens of a text are trained, with both losses and the teacher's pieces.

From a packed batch, the losses and weights of its tokens (`guidance.TokenGuidance`) and the texts,
`view_rows` makes plain data, which pages show, for the command and the training callback alike. No
torch at run time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from vocagnolm.conventions import UNMAPPED
from vocagnolm.spans import Spans, encode

if TYPE_CHECKING:
    import datasets

    from vocagnolm.collator import Batch
    from vocagnolm.guidance import TokenGuidance
    from vocagnolm.packing import Block, Blocks
    from vocagnolm.tokenizers import Reader

VIEW_FORMAT = 1

Status = Literal["kept", "dropped", "unmapped", "unlabelled"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True)
class PieceView:
    """A teacher token behind a student token.

    Attributes:
        text: its characters; tokens that hold parts of one character all have that character.
        start: begin of its characters in the text.
        end: end of them.
        loss_nats: the teacher's.
    """

    text: str
    start: int
    end: int
    loss_nats: float


@dataclass(frozen=True)
class TokenView:
    """A student token and what became of it.

    Attributes:
        text: the name of a special token, else the characters that no token before it shows. So all
            texts but those of special tokens, joined, are the text, and the second token of a
            character (byte fallback) shows none.
        start: begin of its characters in the text, shared ones included.
        end: end of them; `start` for a special token.
        status: "kept" or "dropped" where both losses were compared, "unmapped" where there is no
            teacher loss to compare with, "unlabelled" where there is nothing to learn, as nothing
            predicts a start token.
        is_trained: True if its weight in the loss is not 0.
        student_loss_nats: None where unlabelled.
        teacher_loss_nats: aggregated over its pieces, Eq. (2); None where there is none.
        pieces: the teacher tokens that cover its characters, if they are known.
    """

    text: str
    start: int
    end: int
    status: Status
    is_trained: bool
    student_loss_nats: float | None
    teacher_loss_nats: float | None
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
    """A segment of a document, its begin there, and the block that it was packed into."""

    text: str
    document: int
    start: int
    block: int
    tokens: tuple[TokenView, ...]


@dataclass(frozen=True)
class ViewSettings:
    """Settings under which the tokens were chosen, named as the options of `train.py`.

    Attributes:
        competition: tokens among which the share is taken, in words.
        step: optimizer steps of the student, where a training run shows itself.
    """

    student: str
    teacher: str
    method: str
    top_k: float
    aggregation: str
    unmapped: str
    competition: str
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


@dataclass(frozen=True)
class Summary:
    """Counts of some tokens, and means of their losses; None where none of them has one."""

    tokens: int
    trained: int
    student_nats: float | None
    teacher_nats: float | None
    excess_nats: float | None


def summarize_tokens(tokens: Sequence[TokenView]) -> Summary:
    """Count tokens and average their losses."""

    def mean(value: Callable[[TokenView], float | None]) -> float | None:
        known = [x for token in tokens if (x := value(token)) is not None]
        return fmean(known) if known else None

    return Summary(
        tokens=len(tokens),
        trained=sum(token.is_trained for token in tokens),
        student_nats=mean(lambda token: token.student_loss_nats),
        teacher_nats=mean(lambda token: token.teacher_loss_nats),
        excess_nats=mean(lambda token: token.excess_nats),
    )


@dataclass(frozen=True, eq=False)
class SegmentText:
    """A segment in characters.

    Attributes:
        start: begin in the document.
        specials: names of the special tokens, by position among the student's N tokens.
        spans: int64 [N, 2], characters of the student's tokens; none for special ones.
        teacher_spans: int64 [M, 2], characters of the teacher's text tokens.
        ranges: int64 [N, 2], half-open ranges of those behind each student token.
    """

    text: str
    document: int
    start: int
    specials: Mapping[int, str]
    spans: Spans
    teacher_spans: Spans
    ranges: Spans


@dataclass(frozen=True, eq=False)
class Sample:
    """Some blocks to look at again and again: a batch, and the segments of each of its rows."""

    batch: Batch
    rows: tuple[tuple[SegmentText, ...], ...]


def sample_blocks(
    blocks: Blocks,
    numbers: Sequence[int],
    collate: Callable[[Sequence[Block]], Batch],
    segments: datasets.Dataset,
    corpus: datasets.Dataset,
    readers: tuple[Reader, Reader | None],
) -> Sample:
    """Read some blocks as the trainer does, and their texts.

    Args:
        blocks: those of a training run.
        numbers: which to read.
        collate: the run's `PackedCollator`.
        segments: the rows that the blocks were packed from.
        corpus: the documents, in the column `text`.
        readers: the student's, and the (first) teacher's; None, as with a store, shows losses
            without pieces.
    """
    rows = []
    for number in numbers:
        found = (segments[int(segment)] for segment in blocks.segments(number))
        rows.append(
            tuple(read_segment(row, corpus[row["document"]]["text"], *readers) for row in found)
        )
    return Sample(collate([blocks[number] for number in numbers]), tuple(rows))


def read_segment(
    row: Mapping[str, Any], document: str, student: Reader, teacher: Reader | None
) -> SegmentText:
    """Encode a segment again, which gives the characters of the tokens in its row.

    Args:
        row: one of `data.Segments.rows`.
        document: the text that the segment is cut from.
        student: the student's reader.
        teacher: the (first) teacher's reader, or None: then no token has pieces.
    """
    text, ids = document[row["start"] : row["end"]], row["student_ids"]
    ours = encode(student.tokenizer, text).spans
    # position   0      1 .. last - 1   last ..
    # token      <s>    of the text     </s>, behind a document's end only
    last = 1 + len(ours)
    ends = np.full((len(ids) - last, 2), len(text))
    theirs, ranges = np.zeros((0, 2), np.int64), np.full((len(ids), 2), UNMAPPED)
    if teacher is not None:
        theirs = encode(teacher.tokenizer, text).spans
        # The first teacher's ranges come first. They count its start token, which has no span.
        both = np.stack([row["first"], row["last"]], axis=1)[: len(ids)]
        ranges = np.where(both == UNMAPPED, UNMAPPED, both - 1)
    special = (0, *range(last, len(ids)))
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


class _Verdict(NamedTuple):
    """One token as the tensors have it."""

    student_nats: float
    teacher_nats: float
    has_label: bool
    is_mapped: bool
    is_trained: bool

    @property
    def status(self) -> Status:
        if not self.has_label:
            return "unlabelled"
        if not self.is_mapped:
            return "unmapped"
        return "kept" if self.is_trained else "dropped"


def view_rows(
    batch: Batch, guidance: TokenGuidance, rows: Sequence[Sequence[SegmentText]]
) -> tuple[TextView, ...]:
    """Make the views of all segments of a batch.

    With several teachers the pieces are the first one's, and the loss is that of all.

    Args:
        batch: as a `PackedCollator` makes it.
        guidance: losses and weights of its tokens.
        rows: for each row the segments packed into it, in order.
    """
    columns = (
        guidance.student_loss_BS,
        guidance.teacher_loss_BS,
        guidance.valid_BS,
        guidance.mapped_BS,
        guidance.weight_BS.bool(),
    )
    views = []
    for row, segments in enumerate(rows):
        verdicts = map(_Verdict, *(column[row].tolist() for column in columns))
        # The first teacher's losses come first; those of others are left over.
        piece_losses = iter(guidance.teacher_loss_BT[row].tolist())
        block = int(batch["block"][row])
        views += [_view(segment, block, verdicts, piece_losses) for segment in segments]
    return tuple(views)


def _view(
    segment: SegmentText, block: int, verdicts: Iterator[_Verdict], piece_losses: Iterator[float]
) -> TextView:
    """Make the view of the segment that comes next in a row."""
    # Both iterators are where the segment before in the row has ended.
    text, pieces = segment.text, []
    if len(segment.teacher_spans):
        next(piece_losses)  # of its start token
        for start, end in segment.teacher_spans.tolist():
            pieces.append(PieceView(text[start:end], start, end, next(piece_losses)))
    tokens: list[TokenView] = []
    shown = 0
    for position, ((start, end), (first, last)) in enumerate(
        zip(segment.spans.tolist(), segment.ranges.tolist(), strict=True)
    ):
        verdict = next(verdicts)
        is_compared = verdict.has_label and verdict.is_mapped
        tokens.append(
            TokenView(
                text=segment.specials.get(position, text[max(start, shown) : end]),
                start=start,
                end=end,
                status=verdict.status,
                is_trained=verdict.is_trained,
                student_loss_nats=verdict.student_nats if verdict.has_label else None,
                teacher_loss_nats=verdict.teacher_nats if is_compared else None,
                pieces=() if first == UNMAPPED else tuple(pieces[first:last]),
            )
        )
        shown = max(shown, end)
    return TextView(text, segment.document, segment.start, block, tuple(tokens))


def to_json(view: GuidanceView) -> dict[str, Any]:
    """Return the content of `guidance.json`, which `read_views` reads."""
    return {"format": VIEW_FORMAT, **asdict(view)}


def read_views(path: Path) -> GuidanceView:
    """Read the JSON of `vocagnolm inspect` or a training run.

    Raises:
        ValueError: it is no such file.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != VIEW_FORMAT:
            raise ValueError(f"its format is {content['format']}, expected {VIEW_FORMAT}")
        texts = tuple(_text_from_json(text) for text in content["texts"])
        return GuidanceView(ViewSettings(**content["settings"]), texts)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{path} is no guidance view ({type(error).__name__}: {error}): write it with "
            "vocagnolm inspect --output_dir, or train.py --guidance_table_steps"
        ) from error


def _text_from_json(text: dict[str, Any]) -> TextView:
    tokens = (
        TokenView(**token | {"pieces": tuple(PieceView(**piece) for piece in token["pieces"])})
        for token in text["tokens"]
    )
    return TextView(**text | {"tokens": tuple(tokens)})
