"""Collates packed sequences into a batch, and moves the teachers' ranges to the batch's columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import get_worker_info

from vocagnolm.alignment import segment_shares
from vocagnolm.attention import RowSegments, segments_of
from vocagnolm.conventions import IGNORED_LABEL, UNMAPPED, IntArray
from vocagnolm.packing import Block, FloatArray, segment_rows

# The segments of every row.
_Segments = Sequence[Sequence[IntArray]]


def chunk_edges(tokens: int, chunks: int) -> IntArray:
    """Cut a sequence into chunks of equal token count (Section 2): [edges[c], edges[c + 1]).

    Chunk c of the student is guided by chunk c of the teacher. Counts differ by at most one. If
    there are fewer tokens than chunks, some chunks are empty.

    >>> chunk_edges(10, 4).tolist()
    [0, 2, 5, 7, 10]
    """
    return np.arange(chunks + 1, dtype=np.int64) * tokens // chunks


class Batch(TypedDict, total=False):
    """A batch with B rows, S student and T teacher positions.

    Labels and ranges have the index of their token. Labels are -100 at padding, at the first token
    of a segment, which nothing predicts, and at the unlabelled tokens of a conversation. Entries
    `teacher_...` exist only for sequences with a teacher: rows of an online teacher, or losses from
    a store.
    """

    input_ids: Tensor  # [B, S]
    labels: Tensor  # [B, S]
    position_ids: Tensor  # [B, S]
    # The same segments as `RowSegments`. Padding is cut into pieces, so that it is never the
    # longest.
    segment_edges: Tensor  # int32
    longest_segment: int
    block: Tensor  # [B], indices of the packed sequences
    # Only if the corpus brings weights: of the label tokens; 1 elsewhere.
    weights: Tensor  # float32 [B, S]
    # An online teacher's rows. Columns of several teachers are concatenated; lists have one
    # entry for each.
    teacher_input_ids: Tensor  # [B, T]
    teacher_labels: Tensor  # [B, T]
    teacher_position_ids: Tensor  # [B, T]
    teacher_segment_edges: list[Tensor]
    teacher_longest_segment: list[int]
    teacher_label_tokens: list[int]
    # Read from a store instead; NaN where a token has none.
    teacher_losses: Tensor  # float32 [B, T]
    # Columns that each teacher's rows take; their sum is T.
    teacher_widths: list[int]
    # Ranges count in the T columns, and (-1, -1) is unmapped. The ranges of all S tokens by the
    # first teacher come before those by the second one.
    teacher_ranges: Tensor  # [B, K S, 2]
    # With `shares` only, as `alignment.covered_shares` has them.
    teacher_shares: Tensor  # float32 [B, K S, 3]
    # With `chunks` only: the chunk of each position, that of the last token for padding.
    chunk: Tensor  # [B, S]
    # Label tokens of each row, on the host, so that counts need no host-device sync.
    mapped_tokens: list[int]
    unmapped_tokens: list[int]


def label_tokens(batch: Batch) -> int:
    """Count the student's tokens that have labels."""
    return sum(batch["mapped_tokens"]) + sum(batch["unmapped_tokens"])


def student_segments(batch: Batch) -> RowSegments:
    """Return the segments of the student's rows."""
    return RowSegments(batch["segment_edges"], batch["longest_segment"])


def teacher_segments(batch: Batch) -> list[RowSegments]:
    """Return the segments of every online teacher's rows."""
    teachers = zip(batch["teacher_segment_edges"], batch["teacher_longest_segment"], strict=True)
    return [RowSegments(edges, longest) for edges, longest in teachers]


@dataclass(frozen=True)
class PackedCollator:
    """Make packed sequences the rows of a batch.

    Position ids restart at every segment, which is how the models of `transformers` know that
    attention must not cross; no attention mask may be passed. Padding is a segment of its own. A
    teacher's rows are padded to a multiple of 64, so that their shapes are few, or to the
    `teacher_max_length` of the sequences: a learned table of positions may end there.

    >>> def segments(*tokens: int) -> list[IntArray]:
    ...     return [np.array(tokens)]
    >>> sequence: Block = {
    ...     "block": 0, "student_ids": segments(1, 5, 6), "student_labelled": segments(),
    ...     "teacher_ids": segments(9, 7), "teacher_losses": [np.empty(0, np.float32)],
    ...     "teacher_counts": segments(2), "teacher_labelled": segments(),
    ...     "ranges": [np.array([[[-1, -1], [1, 2], [1, 2]]])],
    ... }
    >>> batch = PackedCollator(max_length=4)([sequence])
    >>> batch["labels"].tolist(), batch["teacher_ranges"].tolist()
    ([[-100, 5, 6, -100]], [[[-1, -1], [1, 2], [1, 2], [-1, -1]]])
    """

    max_length: int
    # Let position ids, and so attention, run through the whole sequence.
    attend_across_documents: bool = False
    teacher_max_length: int | Sequence[int] | None = None
    # Map every token of chunk c of a row to chunk c of the teacher's row (Section 6.1), instead of
    # to the teacher tokens that cover it.
    chunks: int | None = None
    # Measure the shares of characters that `--aggregation share` weighs by.
    shares: bool = False

    def __call__(self, sequences: Sequence[Block]) -> Batch:
        """Make the batch of some packed sequences."""
        student = [sequence["student_ids"] for sequence in sequences]
        trained = []
        for sequence in sequences:
            trained.append(_labels(sequence["student_ids"], sequence["student_labelled"]))
        ids, labels, positions, segments = self._rows(student, trained, self.max_length)
        batch: Batch = {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "segment_edges": segments.edges,
            "longest_segment": segments.longest,
            "block": torch.tensor([sequence["block"] for sequence in sequences]),
        }
        if "student_weights" in sequences[0]:
            rows = [_weights(sequence, self.max_length) for sequence in sequences]
            batch["weights"] = torch.from_numpy(np.stack(rows))
        if self.chunks is not None:
            chunk = [_chunk_of_positions(row, self.max_length, self.chunks) for row in student]
            batch["chunk"] = torch.from_numpy(np.stack(chunk))
        has_label = labels.numpy() != IGNORED_LABEL
        # Without a teacher no token is mapped, and all labels count as unmapped below.
        mapped = np.zeros_like(has_label)
        if "teacher_counts" in sequences[0]:
            widths = self._widths(sequences)
            ranges = np.stack([self._ranges(sequence, widths) for sequence in sequences])
            # A token counts as mapped if every one of the K teachers has a range for it.
            mapped = has_label & (ranges[..., 0] != UNMAPPED).all(1)
            batch["teacher_widths"] = widths
            # [B, K, S, 2] becomes [B, K S, 2], so that the objective looks up the ranges of all
            # teachers in one call.
            batch["teacher_ranges"] = torch.from_numpy(ranges.reshape(len(sequences), -1, 2))
            if self.shares:
                shares = np.stack([self._shares(sequence, len(widths)) for sequence in sequences])
                batch["teacher_shares"] = torch.from_numpy(shares.reshape(len(sequences), -1, 3))
            # A store fills `teacher_losses` and an online teacher `teacher_ids`. The other column
            # exists too, and is empty in every segment.
            if any(any(map(len, sequence["teacher_losses"])) for sequence in sequences):
                losses = np.stack([_losses(sequence, widths) for sequence in sequences])
                batch["teacher_losses"] = torch.from_numpy(losses)
            else:
                batch.update(self._teacher_rows(sequences, widths))
        batch["mapped_tokens"] = mapped.sum(-1).tolist()
        batch["unmapped_tokens"] = (has_label & ~mapped).sum(-1).tolist()
        # A lack of shared memory is an error in the worker here, and would be a hang later.
        if get_worker_info() is not None:
            tree_map_only(Tensor, Tensor.share_memory_, batch)
        return batch

    def _widths(self, sequences: Sequence[Block]) -> list[int]:
        """Return the columns of each teacher."""
        # The counts are summed over the segments of each row, [B, K], and the longest row of a
        # teacher sets its columns.
        tokens = np.array([np.sum(sequence["teacher_counts"], axis=0) for sequence in sequences])
        # A few different widths, and none beyond the teacher's context. Rows of an evaluation may
        # have been packed for a longer one, and no teacher reads them.
        longest = tokens.max(0)
        widths = -(-longest // 64) * 64
        if self.teacher_max_length is not None:
            widths = np.minimum(widths, np.maximum(self.teacher_max_length, longest))
        return widths.tolist()  # type: ignore[no-any-return]

    def _ranges(self, sequence: Block, widths: Sequence[int]) -> IntArray:
        """Return the teacher ranges of a row, [K, S, 2], in the columns of all teachers."""
        if self.chunks is not None:
            return _ranges_of_chunks(sequence, widths, self.max_length, self.chunks)
        ranges = np.full((len(widths), self.max_length, 2), UNMAPPED, np.int64)
        # A segment counts a teacher's tokens from 0; in the columns each teacher has a row of its
        # own. Two segments of two teachers, a and b, and widths of 8 and 8:
        #
        #   counts  [[3, 2], [4, 1]]        segment 0   a a a   b b
        #                                   segment 1   A A A A   B
        #   columns   a a a A A A A . | b b B . . . . .
        #   begins    0     3           8   10          of each segment, by teacher
        begins = np.cumsum(widths) - widths
        start = 0
        for segment_ranges, counts in zip(
            sequence["ranges"], sequence["teacher_counts"], strict=True
        ):
            end = start + segment_ranges.shape[1]
            moved = segment_ranges + begins[:, None, None]
            # -1 is a mark and no position, so it must not move with the segment.
            ranges[:, start:end] = np.where(segment_ranges == UNMAPPED, UNMAPPED, moved)
            begins = begins + counts
            start = end
        return ranges

    def _shares(self, sequence: Block, teachers: int) -> FloatArray:
        """Return the shares of a row, [K, S, 3]; 1.0 at padding."""
        shares = np.ones((teachers, self.max_length, 3), np.float32)
        parts = [segment_shares(row, row["ranges"]) for row in segment_rows(sequence)]
        text_shares = np.concatenate(parts, axis=1)
        shares[:, : text_shares.shape[1]] = text_shares
        return shares

    def _teacher_rows(self, sequences: Sequence[Block], widths: Sequence[int]) -> Batch:
        """Return what online teachers read of a batch, each teacher in columns of its own."""
        # The labelled ranges count in the concatenated tokens of all teachers, so labels are made
        # before a segment is split by teacher.
        labels_by_sequence = []
        for sequence in sequences:
            labels_by_sequence.append(
                _labels(sequence["teacher_ids"], sequence["teacher_labelled"])
            )
        ids_by_teacher = []
        labels_by_teacher = []
        positions_by_teacher = []
        edges_by_teacher = []
        longest_by_teacher = []
        label_counts = []
        for teacher, width in enumerate(widths):
            rows = []
            trained = []
            for sequence, labels in zip(sequences, labels_by_sequence, strict=True):
                rows.append(_of_teacher(sequence, sequence["teacher_ids"], teacher))
                trained.append(_of_teacher(sequence, labels, teacher))
            ids_BT, labels_BT, positions_BT, segments = self._rows(rows, trained, width)
            ids_by_teacher.append(ids_BT)
            labels_by_teacher.append(labels_BT)
            positions_by_teacher.append(positions_BT)
            edges_by_teacher.append(segments.edges)
            longest_by_teacher.append(segments.longest)
            label_counts.append(int((labels_BT != IGNORED_LABEL).sum()))
        return {
            "teacher_input_ids": torch.cat(ids_by_teacher, -1),
            "teacher_labels": torch.cat(labels_by_teacher, -1),
            "teacher_position_ids": torch.cat(positions_by_teacher, -1),
            "teacher_segment_edges": edges_by_teacher,
            "teacher_longest_segment": longest_by_teacher,
            "teacher_label_tokens": label_counts,
        }

    def _rows(
        self, sequences: _Segments, trained: _Segments, length: int
    ) -> tuple[Tensor, Tensor, Tensor, RowSegments]:
        """Return ids, labels and positions [B, length], and what attends to itself."""
        shape = (len(sequences), length)
        ids = np.zeros(shape, np.int64)
        labels = np.full(shape, IGNORED_LABEL, np.int64)
        positions = np.zeros(shape, np.int64)
        # Segments stand one after the other from the left, and padding keeps the values above:
        #
        # ids        1   5 6 2   1   7   0   0       two segments, and padding
        # labels    -100 5 6 2 -100  7 -100 -100
        # positions  0   1 2 3   0   1   0   0
        lengths = []
        for row, segments in enumerate(sequences):
            lengths.append(list(map(len, segments)))
            start = 0
            for segment, segment_labels in zip(segments, trained[row], strict=True):
                end = start + len(segment)
                ids[row, start:end] = segment
                labels[row, start:end] = segment_labels
                # Nothing predicts the first token of a segment.
                labels[row, start : start + 1] = IGNORED_LABEL
                positions[row, start:end] = np.arange(len(segment))
                start = end
        # Padding must not be the longest, or the kernel would be called for more than it needs.
        longest = max(itertools.chain.from_iterable(lengths), default=0) or length
        for tokens in lengths:
            # The segments of a row must add up to its whole length, as edges run on from one row
            # to the next. `segments_of` drops a last piece of no tokens.
            whole_pieces, last_piece = divmod(length - sum(tokens), longest or 1)
            tokens += [longest] * whole_pieces
            tokens.append(last_piece)
        if self.attend_across_documents:
            # Padding stands at the end of a row, so no token of a text attends to it.
            positions[:] = np.arange(length)
            lengths = [[length]] * len(sequences)
        ids_BS = torch.from_numpy(ids)
        labels_BS = torch.from_numpy(labels)
        positions_BS = torch.from_numpy(positions)
        return ids_BS, labels_BS, positions_BS, segments_of(itertools.chain(*lengths))


def _labels(segments: Sequence[IntArray], labelled: Sequence[IntArray]) -> list[IntArray]:
    """Return the labels of segments: all ids, or those in concatenated ranges [first, last).

    >>> _labels([np.array([7, 8, 9]), np.array([5, 6])], [np.array([1, 2]), np.array([])])
    [array([-100,    8, -100]), array([5, 6])]
    """
    labels = []
    for ids, ranges in zip(segments, labelled, strict=True):
        if not len(ranges):
            labels.append(ids)
            continue
        # Ids may have a type without negative numbers.
        segment_labels = np.full(len(ids), IGNORED_LABEL, np.int64)
        for first, last in np.asarray(ranges, np.int64).reshape(-1, 2):
            segment_labels[first:last] = ids[first:last]
        labels.append(segment_labels)
    return labels


def _weights(sequence: Block, length: int) -> FloatArray:
    """Return the weights that the corpus gives to the tokens of a row [S]."""
    row = np.ones(length, np.float32)
    start = 0
    for segment in segment_rows(sequence):
        end = start + len(segment["student_ids"])
        ranges = start + np.reshape(segment["student_labelled"], (-1, 2)).astype(np.int64)
        # Without ranges, all tokens have labels, and the weight of their document.
        if not len(ranges):
            ranges = np.array([[start, end]])
        # A corpus beside the one that brings weights has none.
        for (first, last), weight in zip(ranges, segment["student_weights"], strict=False):
            row[first:last] = weight
        start = end
    return row


def _of_teacher(sequence: Block, column: Sequence[Any], teacher: int) -> list[Any]:
    """Take one teacher's part of what every segment has of all teachers."""
    parts = []
    for values, counts in zip(column, sequence["teacher_counts"], strict=True):
        # `np.split` takes the inner edges alone, so the last sum, the end, is left out.
        edges = np.cumsum(counts)[:-1]
        parts.append(np.split(values, edges)[teacher])
    return parts


def _losses(sequence: Block, widths: Sequence[int]) -> FloatArray:
    """Return the stored losses of a row [T], NaN at padding."""
    row = np.full(sum(widths), np.nan, np.float32)
    # `np.split` gives views of the row, so what is written to a teacher's columns is in the row.
    for teacher, columns in enumerate(np.split(row, np.cumsum(widths)[:-1])):
        losses = np.concatenate(_of_teacher(sequence, sequence["teacher_losses"], teacher))
        columns[: len(losses)] = losses
    return row


def _chunk_of_positions(student: Sequence[IntArray], length: int, chunks: int) -> IntArray:
    """Return the chunk of every position of a row [S]."""
    tokens = sum(map(len, student))
    # Padding gets the position of the last token, and with it the chunk of that token.
    positions = np.arange(length).clip(max=tokens - 1)
    # A chunk of no tokens has two equal edges. "right" steps over both, so that the position is
    # in the chunk that holds it.
    return chunk_edges(tokens, chunks).searchsorted(positions, side="right") - 1


def _ranges_of_chunks(sequence: Block, widths: Sequence[int], length: int, chunks: int) -> IntArray:
    """Return the ranges [K, S, 2] that are the chunks of the teachers' rows."""
    tokens = sum(map(len, sequence["student_ids"]))
    chunk = _chunk_of_positions(sequence["student_ids"], length, chunks)[:tokens]
    ranges = np.full((len(widths), length, 2), UNMAPPED, np.int64)
    begin = 0
    for teacher, width in enumerate(widths):
        counts = np.array([counts[teacher] for counts in sequence["teacher_counts"]], np.int64)
        edges = chunk_edges(int(counts.sum()), chunks)
        # The first token of a segment has no loss; a chunk of such tokens only guides nothing.
        # Before an edge stand as many such tokens as segments have begun, and the difference of
        # two edges is then the number of losses in the chunk between them.
        firsts_before = (np.cumsum(counts) - counts).searchsorted(edges)
        losses = np.diff(edges - firsts_before)
        chunk_ranges = begin + np.stack([edges[:-1], edges[1:]], -1)
        chunk_ranges[losses <= 0] = UNMAPPED
        # Every token gets the range of the chunk that it is in.
        ranges[teacher, :tokens] = chunk_ranges[chunk]
        begin += width
    return ranges
