"""Packed sequences and batches against slow references."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vocagnolm.alignment import align_segment
from vocagnolm.data import Segments
from vocagnolm.packing import Block, Blocks, pack
from vocagnolm.training.in_python import prepare_dataset

ROOM, TEACHER_ROOM = 16, 20
segment_lengths = st.lists(
    st.tuples(st.integers(1, ROOM), st.integers(0, TEACHER_ROOM)), max_size=60
)


# pack


def slow_best_fit(lengths: list[tuple[int, int]], room: int, teacher_room: int) -> list[list[int]]:
    """Put the longest segment first into the fullest sequence with room, on ties the last filled.

    Lengths are shares of the tighter limit, in student tokens.
    """
    share = Fraction(room, teacher_room)
    needs = [max(ours, math.ceil(theirs * share)) for ours, theirs in lengths]
    blocks: list[dict[str, Any]] = []
    for clock, segment in enumerate(sorted(range(len(lengths)), key=lambda i: -needs[i])):
        with_room = [sequence for sequence in blocks if sequence["room"] >= needs[segment]]
        if with_room:
            sequence = min(with_room, key=lambda sequence: (sequence["room"], -sequence["clock"]))
        else:
            sequence = {"segments": []}
            blocks.append(sequence)
        sequence["segments"].append(segment)
        left = room - sum(lengths[i][0] for i in sequence["segments"])
        teacher_left = teacher_room - sum(lengths[i][1] for i in sequence["segments"])
        sequence["room"] = min(left, math.floor(teacher_left * share))
        sequence["clock"] = clock
    return [sorted(sequence["segments"]) for sequence in blocks]


@given(segment_lengths)
@example([(ROOM, TEACHER_ROOM)] * 3)
@example([(1, TEACHER_ROOM), (1, TEACHER_ROOM), (1, 0)])
def test_pack_equals_slow_best_fit_decreasing(lengths: list[tuple[int, int]]) -> None:
    ours, theirs = [a for a, _ in lengths], [b for _, b in lengths]
    assert pack(ours, theirs, ROOM, TEACHER_ROOM) == slow_best_fit(lengths, ROOM, TEACHER_ROOM)
    unlimited = [(a, 0) for a in ours]
    assert pack(ours, theirs, ROOM, 10**9) == slow_best_fit(unlimited, ROOM, 1)


@given(segment_lengths)
def test_pack_keeps_every_teachers_limit(lengths: list[tuple[int, int]]) -> None:
    ours, theirs = [a for a, _ in lengths], [[b, 2 * a] for a, b in lengths]
    limits = [TEACHER_ROOM, 2 * ROOM - 1 if all(a < ROOM for a in ours) else 2 * ROOM]
    blocks = pack(ours, np.array(theirs).reshape(-1, 2), ROOM, limits)
    assert sorted(chain(*blocks)) == [*range(len(lengths))]
    for sequence in blocks:
        for teacher, limit in enumerate(limits):
            assert sum(theirs[segment][teacher] for segment in sequence) <= limit
    once = pack(ours, [b for _, b in lengths], ROOM, TEACHER_ROOM)
    for limit in (TEACHER_ROOM, [TEACHER_ROOM] * 2):  # one limit is that of every teacher
        assert pack(ours, np.array(lengths).reshape(-1, 2)[:, [1, 1]], ROOM, limit) == once


@pytest.mark.parametrize("ratio", [0.95, 1.2])
def test_pack_fills_the_teachers_row_if_tighter(ratio: float) -> None:
    random = np.random.default_rng(0)
    ours = np.clip(random.lognormal(6.5, 1, 20_000).astype(int), 4, 2048)
    theirs = np.clip((ours * ratio * random.uniform(0.7, 1.3, len(ours))).astype(int), 1, 2048)
    lowest = np.maximum(ours, theirs).sum() / 2048  # if no two segments make up for each other
    assert len(pack(ours, theirs, 2048, 2048)) < 1.02 * lowest


# Blocks


def lists(sequence: dict[str, Any]) -> dict[str, Any]:
    """A sequence as plain lists."""
    return {
        name: value if name == "block" else [np.asarray(segment).tolist() for segment in value]
        for name, value in sequence.items()
    }


@pytest.mark.parametrize("selected", [False, True])
def test_blocks_hold_the_rows_of_their_segments(aligned: Segments, selected: bool) -> None:
    rows = aligned.rows
    if selected:  # as after split(): indices over the same table
        rows = rows.select(list(range(len(rows) - 1, 0, -2)))
    blocks = Blocks(rows, 48, 60)
    numbers = pack(rows["student_tokens"], rows["teacher_tokens"], 48, 60)
    assert len(blocks) == len(numbers) > 5
    for index in (len(blocks) - 1, *range(len(blocks))):  # in any order
        expected = [rows[number] for number in numbers[index]]
        content = [row | {"ranges": align_segment(row).tolist()} for row in expected]
        # Only a corpus with weights has a column of them.
        names = set(Block.__annotations__) - {"block", "student_weights"}
        assert lists(blocks[index]) == {
            "block": index,
            **{name: [row[name] for row in content] for name in names},
        }


def test_blocks_count_tokens_when_asked(aligned: Segments) -> None:
    blocks = Blocks(aligned.rows, 48, 60)
    total = sum(len(ids) for ids in aligned.rows["student_ids"])
    assert blocks.student_tokens == total
    assert blocks.fill_fraction == total / (48 * len(blocks))
    assert 0.5 < blocks.fill_fraction <= 1.0
    empty = Blocks(aligned.rows.select([]), 48, 60)
    assert (len(empty), empty.fill_fraction) == (0, 0.0)
    assert empty.longest_segments == [0]


def test_corpora_are_packed_apart(aligned: Segments) -> None:
    sizes = {"a": 5, "b": 2, "c": len(aligned.rows) - 7}
    blocks = Blocks(aligned.rows, 48, 60, sizes)
    edges = np.cumsum([0, *sizes.values()])
    corpora = [edges.searchsorted(blocks.segments(i), "right") - 1 for i in range(len(blocks))]
    assert all(len({*corpus.tolist()}) == 1 for corpus in corpora)
    assert blocks.parts == dict(zip(sizes, np.bincount([c[0] for c in corpora]), strict=True))
    assert sorted(n for i in range(len(blocks)) for n in blocks.segments(i)) == [*range(edges[-1])]


@pytest.mark.parametrize("limits", [(2, 9), (0, 9), (9, 2)])
def test_pack_rejects_segments_beyond_a_limit(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"\[3, 4\] tokens, beyond"):
        pack([3, 1], [4, 1], *limits)


def test_prepare_dataset_packs_for_several_teachers_or_none(
    training_texts: list[str], student_tokenizer: Any, teacher_tokenizer: Any
) -> None:
    data = datasets.Dataset.from_dict({"body": training_texts[:20]})
    both = [teacher_tokenizer, student_tokenizer]
    several = prepare_dataset(data, student_tokenizer, both, text_column="body")
    assert len(several[0]["teacher_counts"][0]) == 2
    assert "teacher_ids" not in prepare_dataset(data, student_tokenizer, text_column="body")[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"body": ["a"]}}, "'text' is not"),
        ({"data": {"text": [" "]}}, "1 skipped"),
        ({"teacher_context": 1}, "teacher_context must be in"),
        ({"teacher_context": None}, "teacher_context must be in"),
    ],
)
def test_prepare_dataset_names_what_is_wrong(
    changes: dict[str, Any], reason: str, student_tokenizer: Any
) -> None:
    given = {"data": {"text": ["a"]}, "student_tokenizer": student_tokenizer, **changes}
    rows = datasets.Dataset.from_dict(given.pop("data"))
    with pytest.raises(ValueError, match=reason):
        prepare_dataset(rows, **given)
