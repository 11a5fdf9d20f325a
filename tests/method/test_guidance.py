"""Aggregation and selection against slow references, on random ragged ranges."""

import math
from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm import guidance
from vocagnolm.guidance import (
    accept_tokens,
    aggregate_teacher_losses,
    random_scores,
    reduce_teachers,
    select_tokens,
    select_top,
    selected_count,
)
from vocagnolm.method import Aggregation


def least(loss_BSW, held_BSW):
    """A user's own aggregation."""
    return loss_BSW.masked_fill(~held_BSW, math.inf).amin(-1)


AGGREGATE = {"max": max, "sum": sum, "mean": lambda x: sum(x) / len(x), least: min}
# Few distinct values: many ties.
LOSSES = st.floats(0, 20, width=32) | st.sampled_from([0.0, 0.5, 1.0, 2.0])
SHARES = st.sampled_from([1.0, 0.5, 0.25, 0.75])  # of the first token, those between, the last
TOP_K = st.integers(1, 10**6).map(lambda millionths: millionths / 10**6) | st.sampled_from(
    [0.1, 0.3, 0.4, 0.6, 0.7, 1.0]
)


@st.composite
def teacher_batches(draw):
    """Losses, validity and ranges: empty, overlapping, unmapped, in any order."""
    rows, teacher_tokens, tokens = (
        draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(1, 12))
    )  # fmt: skip
    position = st.integers(0, teacher_tokens)
    ranges = st.tuples(position, position).map(sorted).map(tuple) | st.just((-1, -1))

    def matrix(values, width):
        row = st.lists(values, min_size=width, max_size=width)
        return draw(st.lists(row, min_size=rows, max_size=rows))

    return (
        matrix(LOSSES, teacher_tokens),
        matrix(st.integers(0, 3).map(bool), teacher_tokens),
        matrix(ranges, tokens),
        matrix(st.tuples(SHARES, SHARES, SHARES), tokens),
    )


@given(teacher_batches(), st.sampled_from([*get_args(Aggregation), least]))
def test_aggregation_equals_a_loop_over_tokens(batch, aggregation):
    losses, valid, ranges, shares = batch
    found, mapped = aggregate_teacher_losses(
        *map(torch.tensor, (losses, ranges)), aggregation, *map(torch.tensor, (valid, shares))
    )
    assert found.dtype == torch.float32
    for row, row_ranges in enumerate(ranges):
        for token, (first, last) in enumerate(row_ranges):
            present = [losses[row][t] for t in range(first, last) if first >= 0 and valid[row][t]]
            assert mapped[row, token] == bool(present)
            if aggregation == "share":
                counts = {first: 0, last - 1: 2} | {first: 0}  # a range of one has only a first
                expected = sum(
                    losses[row][t] * shares[row][token][counts.get(t, 1)]
                    for t in range(first, last)
                    if present and valid[row][t]
                )
            else:
                expected = AGGREGATE[aggregation](present) if present else 0.0
            assert found[row, token] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_aggregation_of_narrow_numbers_is_exact_and_has_no_gradient():
    loss = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.float16, requires_grad=True)
    ranges = torch.tensor([[[-1, -1], [0, 2], [1, 4], [2, 2], [3, 4]]], dtype=torch.int32)
    found, mapped = aggregate_teacher_losses(loss, ranges)
    assert found.tolist() == [[0.0, 3.0, 3.0, 0.0, 2.0]]
    assert mapped.tolist() == [[False, True, True, False, True]]
    assert not found.requires_grad


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 9, 31, 32, 33])
def test_maxima_of_every_range_of_a_row(length):
    loss = torch.rand(1, length, generator=torch.Generator().manual_seed(length)) + 0.1
    ranges = [(a, b) for a in range(length) for b in range(a + 1, length + 1)]
    found, _ = aggregate_teacher_losses(loss, torch.tensor([ranges]))
    assert found[0].tolist() == [float(loss[0, a:b].max()) for a, b in ranges]


@pytest.mark.parametrize("length", [1, 4096])
def test_share_is_the_loss_for_equal_tokenizers(length):
    loss = torch.rand(2, length, generator=torch.Generator().manual_seed(0)).pow(9)
    own = torch.arange(length)
    ranges = torch.stack([own, own + 1], -1).expand(2, -1, -1)
    found, _ = aggregate_teacher_losses(loss, ranges, "share", None, torch.ones(2, length, 3))
    assert torch.equal(found, loss)


def test_short_ranges_keep_their_precision_late_in_rows():
    generator = torch.Generator().manual_seed(0)
    loss = 20 * torch.rand(1, 100_000, generator=generator)
    loss[0, -1] = 1e-4
    found, _ = aggregate_teacher_losses(loss, torch.tensor([[[99_999, 100_000]]]), "sum")
    assert found.item() == pytest.approx(1e-4, rel=1e-5)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_teacher_loss_breaks_only_its_ranges(aggregation, broken):
    loss = torch.tensor([[1.0, broken, 2.0, broken, 3.0]])
    valid = torch.tensor([[True, True, True, False, True]])
    ranges = torch.tensor([[[0, 1], [0, 2], [1, 3], [2, 3], [2, 5]]])
    shares = torch.full((1, 5, 3), 0.5)
    found, mapped = aggregate_teacher_losses(loss, ranges, aggregation, valid, shares)
    assert mapped.all()
    assert found.isfinite().tolist() == [[True, False, False, True, True]]
    assert found[0, 4] == {"max": 3.0, "mean": 2.5, "sum": 5.0, "share": 2.5}[aggregation]


def slow_selection(student, teacher, valid, mapped, top_k, unmapped, scope):
    """Eq. (4) with sorted lists and fractions."""
    rows, positions = range(len(student)), range(len(student[0]))
    every = [(b, s) for b in rows for s in positions if valid[b][s]]
    known = [(b, s) for b, s in every if mapped[b][s]]
    mean = sum(teacher[b][s] for b, s in known) / len(known) if known else 0.0
    excess = {(b, s): student[b][s] - (teacher[b][s] if mapped[b][s] else mean) for b, s in every}
    competing = every if unmapped == "mean" else known
    chosen = set()
    for group in [rows] if scope == "batch" else [[b] for b in rows]:
        tokens = sorted((t for t in competing if t[0] in group), key=lambda t: (-excess[t], t))
        chosen |= set(tokens[: math.ceil(Fraction(str(top_k)) * len(tokens))])
    if unmapped == "include":
        chosen |= set(every) - set(known)
    return [[float((b, s) in chosen) for s in positions] for b in rows]


@st.composite
def student_batches(draw):
    rows, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 15))
    # Multiples of 1/4 make excess and mean exact, hence ties certain.
    values = st.integers(0, 12).map(lambda quarters: quarters / 4)
    matrices = []
    for cells in (values, values, st.booleans(), st.booleans()):
        row = st.lists(cells, min_size=tokens, max_size=tokens)
        matrices.append(draw(st.lists(row, min_size=rows, max_size=rows)))
    return matrices


@given(
    student_batches(),
    TOP_K,
    st.sampled_from(get_args(guidance.Unmapped)),
    st.sampled_from(get_args(guidance.Scope)),
)
def test_selection_equals_a_sorted_list(batch, top_k, unmapped, scope):
    student, teacher, valid, mapped = batch
    if unmapped == "mean":  # rounding a mean of thirds to float32 could break exact ties
        teacher = [[1.0] * len(row) for row in teacher]
    tensors = [torch.tensor(x) for x in (student, teacher, valid, mapped)]
    tensors[0].requires_grad_()
    found = select_tokens(*tensors, top_k=top_k, unmapped=unmapped, scope=scope)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.tolist() == slow_selection(
        *batch[:1], teacher, valid, mapped, top_k, unmapped, scope
    )
    known, unknown = tensors[2] & tensors[3], tensors[2] & ~tensors[3]
    if scope == "sequence":
        count = selected_count(known.sum(-1), unknown.sum(-1), top_k, unmapped)
        assert torch.equal(found.sum(-1).long(), count)
    else:
        count = selected_count(int(known.sum()), int(unknown.sum()), top_k, unmapped)
        assert found.sum() == count


@given(
    student_batches(),
    TOP_K,
    st.sampled_from(["include", "exclude"]),
    st.sampled_from(get_args(guidance.Scope)),
)
def test_entropy_keeps_the_intersection_of_two_lists(batch, top_k, unmapped, scope):
    student, entropy, valid, mapped = batch
    teacher = [row[::-1] for row in student]
    tensors = [torch.tensor(x) for x in (student, teacher, valid, mapped)]
    options = {"top_k": top_k, "unmapped": unmapped, "scope": scope}
    found = select_tokens(*tensors, **options, entropy_BS=torch.tensor(entropy))
    zeros = [[0.0] * len(row) for row in student]
    by_excess = slow_selection(student, teacher, valid, mapped, *options.values())
    by_entropy = slow_selection(zeros, entropy, valid, mapped, *options.values())
    assert torch.equal(found, torch.tensor(by_excess).minimum(torch.tensor(by_entropy)))


@given(student_batches())
def test_acceptance_is_a_ratio_of_probabilities(batch):
    found = accept_tokens(*map(torch.tensor, batch))
    assert found.dtype == torch.float32
    for b, row in enumerate(zip(*(matrix for matrix in batch), strict=True)):
        for s, (student, teacher, valid, mapped) in enumerate(zip(*row, strict=True)):
            ratio = math.exp(-teacher) / math.exp(-student) if mapped else 1.0
            assert found[b, s] == pytest.approx(min(1.0, ratio) if valid else 0.0)


def test_acceptance_has_no_nan_where_a_teacher_has_no_loss():
    odd = [math.nan, math.inf, math.inf, -math.inf, 100.0]
    student = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])
    mapped = torch.tensor([[False, False, True, False, True]])
    every = torch.ones(1, 5).bool()
    found = accept_tokens(student, torch.tensor([odd]), every, mapped)
    assert found.tolist() == [[1.0, 1.0, 0.0, 1.0, pytest.approx(0.0, abs=1e-30)]]
    assert accept_tokens(student, torch.tensor([odd]), ~every, mapped).tolist() == [[0.0] * 5]


def test_mean_strategy_uses_the_whole_batchs_mean():
    student = torch.tensor([[5.0, 5.0], [3.0, 6.0]])
    teacher = torch.tensor([[9.0, 0.0], [1.0, 0.0]])  # mean over the mapped: 5, so excess 0 and 1
    valid, mapped = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[1, 0], [1, 0]]).bool()
    found = select_tokens(
        student, teacher, valid, mapped, top_k=0.5, unmapped="mean", scope="sequence"
    )
    assert found.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("odd", [-math.inf, math.inf, math.nan])
def test_counts_are_exact_when_scores_are_not_finite(odd):
    score = torch.tensor([[odd, 1.0, odd, 2.0, odd]])
    candidates = torch.tensor([[False, True, True, True, False]])
    for top_k, count in ((0.3, 1), (0.6, 2), (1.0, 3)):
        chosen = select_top(score, candidates, top_k, "sequence")
        assert chosen.sum() == count
        assert not (chosen & ~candidates).any()


def test_ties_go_to_the_lower_position():
    chosen = select_top(torch.zeros(2, 100), torch.ones(2, 100).bool(), 0.4, "sequence")
    assert chosen.tolist() == [[True] * 40 + [False] * 60] * 2
    chosen = select_top(torch.zeros(2, 100), torch.ones(2, 100).bool(), 0.4, "batch")
    assert chosen.tolist() == [[True] * 80 + [False] * 20, [False] * 100]


@given(st.integers(0, 10**9), st.integers(0, 10**9), TOP_K)
def test_counts_are_exact_on_host_and_device(mapped, unmapped, top_k):
    share = {
        "include": math.ceil(Fraction(str(top_k)) * mapped) + unmapped,
        "exclude": math.ceil(Fraction(str(top_k)) * mapped),
        "mean": math.ceil(Fraction(str(top_k)) * (mapped + unmapped)),
    }
    for strategy, expected in share.items():
        assert selected_count(mapped, unmapped, top_k, strategy) == expected
        tensors = torch.tensor([mapped, 0]), torch.tensor([unmapped, 0])
        assert selected_count(*tensors, top_k, strategy).tolist() == [expected, 0]


def test_random_scores_are_those_of_their_block_and_seed():
    blocks, columns = torch.tensor([7, 0, 123_456, 7, 2**40]), torch.arange(64)
    scores = random_scores(blocks, columns, seed=3)
    alone = [random_scores(block[None], columns, seed=3) for block in blocks]
    assert torch.equal(scores, torch.cat(alone))
    for seed in (4, -1, 2**64 + 4, 2**70 + 5):
        assert not (scores == random_scores(blocks, columns, seed)).any()


def test_random_scores_follow_splitmix64():
    def mix(x):  # Steele, Lea and Flood (2014), in unsigned arithmetic
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the first output of the published generator for seed 0
    expected = [[mix(mix(mix(5) + b) + s) % 2**63 for s in range(20)] for b in (0, 9)]
    assert random_scores(torch.tensor([0, 9]), torch.arange(20), seed=5).tolist() == expected


@pytest.mark.parametrize("reduction", ["min", "max", "mean", "weighted"])
def test_several_teachers_reduce_as_in_a_loop(reduction):
    rows, teachers, tokens, weights = 2, 3, 5, (1.0, 2.0, 5.0)
    generator = torch.Generator().manual_seed(0)
    loss = torch.rand(rows, teachers * tokens, generator=generator)
    mapped = torch.rand(loss.shape, generator=generator) < 0.8
    given = weights if reduction == "weighted" else ()
    found, all_mapped = reduce_teachers(loss, mapped, teachers, reduction, given)
    for row in range(rows):
        for token in range(tokens):
            theirs = [float(loss[row, k * tokens + token]) for k in range(teachers)]
            known = all(mapped[row, k * tokens + token] for k in range(teachers))
            expected = {
                "min": min(theirs),
                "max": max(theirs),
                "mean": sum(theirs) / teachers,
                "weighted": sum(w * x for w, x in zip(weights, theirs, strict=True)) / sum(weights),
            }[reduction]
            assert all_mapped[row, token] == known
            assert found[row, token] == pytest.approx(expected if known else 0.0, rel=1e-6)
    assert not all_mapped.all()
    assert all_mapped.any()
    assert found.dtype == loss.dtype


@pytest.mark.parametrize(
    ("aggregation", "reason"),
    [
        ("min", "aggregation"),
        ("share", "PackedCollator"),
        (lambda loss_BSW, _: loss_BSW, "for each student"),
        (lambda loss_BSW, _: loss_BSW.amin(-1) * math.nan, "got NaN"),
    ],
)
def test_wrong_aggregation_is_rejected(aggregation, reason):
    with pytest.raises(ValueError, match=reason):
        aggregate_teacher_losses(torch.ones(1, 1), torch.tensor([[[0, 1]]]), aggregation)
