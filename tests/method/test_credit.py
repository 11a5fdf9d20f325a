"""Credit on a student's own text: enumerated against the gradient of the reverse KL divergence."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.alignment import align_spans, covered_shares
from vocagnolm.conventions import UNMAPPED, Spans
from vocagnolm.credit import add_end, aggregate_losses, chunk_credit
from vocagnolm.guidance import aggregate_teacher_losses


@dataclass(frozen=True)
class Toy:
    """All texts of `length` letters; each model cuts every text at the same places."""

    letters: int
    length: int
    student_ends: tuple[int, ...]
    teacher_ends: tuple[int, ...]

    def texts(self) -> list[tuple[int, ...]]:
        return list(itertools.product(range(self.letters), repeat=self.length))

    def spans(self, ends: tuple[int, ...]) -> Spans:
        return np.array(list(zip((0, *ends[:-1]), ends, strict=True)))

    def log_probabilities(self, joint: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
        """Split the log-probabilities of all texts into those of tokens, given what is before."""
        rows = []
        for text in self.texts():
            tokens = []
            for start, end in zip((0, *ends[:-1]), ends, strict=True):
                # A prefix is as likely as all texts that begin with it.
                through = joint[text[:end]].flatten().logsumexp(0)
                before = joint[text[:start]].flatten().logsumexp(0)
                tokens.append(through - before)
            rows.append(torch.stack(tokens))
        return torch.stack(rows)


PAIRS = Toy(3, 2, student_ends=(1, 2), teacher_ends=(2,))
QUADS = Toy(2, 4, student_ends=(2, 4), teacher_ends=(1, 4))
# The first chunk ends after two letters.
CHUNKS = Toy(2, 4, student_ends=(1, 2, 4), teacher_ends=(2, 3, 4))
TOYS = [PAIRS, QUADS, CHUNKS]


def joint_of(toy: Toy, seed: int) -> torch.Tensor:
    """Draw the log-probabilities of all texts, [letters] * length."""
    generator = torch.Generator().manual_seed(seed)
    shape = (toy.letters,) * toy.length
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * 1.5
    return torch.log_softmax(logits.flatten(), 0).view(shape)


def gradients(
    toy: Toy, student: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected gradient of credit, and that of the reverse KL, over all texts."""
    logits = student.clone().requires_grad_()
    joint = torch.log_softmax(logits.flatten(), 0).view(logits.shape)
    student_logp = toy.log_probabilities(joint, toy.student_ends)
    teacher_logp = toy.log_probabilities(teacher, toy.teacher_ends)
    ranges = align_spans(toy.spans(toy.student_ends), toy.spans(toy.teacher_ends))
    surrogate = torch.zeros((), dtype=torch.float64)
    divergence = torch.zeros((), dtype=torch.float64)
    for own, other in zip(student_logp, teacher_logp, strict=True):
        advantages = torch.tensor(
            np.asarray(chunk_credit((-own).tolist(), (-other).tolist(), ranges)),
            dtype=torch.float64,
        )
        probability = own.sum().exp()
        surrogate = surrogate + probability.detach() * (advantages * -own).sum()
        divergence = divergence + probability * (own.sum() - other.sum())
    (expected,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(divergence, logits)
    return expected, exact


@pytest.mark.parametrize("toy", [PAIRS, QUADS])
def test_expected_gradient_is_that_of_the_reverse_kl(toy: Toy) -> None:
    expected, exact = gradients(toy, joint_of(toy, 0), joint_of(toy, 1))
    assert exact.norm() > 0.05
    torch.testing.assert_close(expected, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("toy", TOYS)
def test_a_student_that_equals_its_teacher_stays_where_it_is(toy: Toy) -> None:
    joint = joint_of(toy, 2)
    expected, _ = gradients(toy, joint, joint)
    assert expected.norm() < 1e-12


# Places where tokens end in a text of ten characters.
ENDS = st.sets(st.integers(1, 9)).map(lambda places: (*sorted(places), 10))


def spans_of(ends: Sequence[int]) -> Spans:
    return np.array(list(zip([0, *ends[:-1]], ends, strict=True)))


def slow_credit(
    student: list[float], teacher: list[float], student_spans: Spans, teacher_spans: Spans
) -> list[float]:
    """Sum up to the end of the chunk, which is where tokens of both models end."""
    shared = {int(end) for end in student_spans[:, 1]} & {int(end) for end in teacher_spans[:, 1]}
    credit = []
    for start, _ in student_spans.tolist():
        chunk_end = min(end for end in shared if end > start)
        own = sum(
            loss
            for loss, (first, _) in zip(student, student_spans.tolist(), strict=True)
            if start <= first < chunk_end
        )
        other = sum(
            loss
            for loss, (_, last) in zip(teacher, teacher_spans.tolist(), strict=True)
            if start < last <= chunk_end
        )
        credit.append(own - other)
    return credit


@given(ENDS, ENDS, st.randoms(use_true_random=False))
def test_credit_equals_a_walk_over_the_characters(
    student_ends: tuple[int, ...], teacher_ends: tuple[int, ...], random: Random
) -> None:
    student_spans, teacher_spans = spans_of(student_ends), spans_of(teacher_ends)
    student = [random.uniform(0, 5) for _ in student_ends]
    teacher = [random.uniform(0, 5) for _ in teacher_ends]
    ranges = align_spans(student_spans, teacher_spans)
    expected = slow_credit(student, teacher, student_spans, teacher_spans)
    np.testing.assert_allclose(chunk_credit(student, teacher, ranges), expected, atol=1e-12)


def test_the_ends_of_both_models_are_one_chunk() -> None:
    spans = np.array([[0, 2], [2, 3]])
    ranges = align_spans(add_end(spans, "abc"), add_end(spans[:1] + [[0, 1]], "abc"))
    assert ranges.tolist() == [[0, 1], [0, 1], [1, 2]]
    credit = chunk_credit([1.0, 1.0, 5.0], [2.0, 0.5], ranges)
    assert credit.tolist() == [0.0, -1.0, 4.5]


def test_unmapped_tokens_have_no_credit_and_give_none() -> None:
    ranges = np.array([[0, 1], [UNMAPPED, UNMAPPED], [0, 1]])
    assert chunk_credit([1.0, 9.0, 2.0], [4.0], ranges).tolist() == [-1.0, 0.0, -2.0]
    assert chunk_credit([], [], np.empty((0, 2), np.int64)).tolist() == []


def test_losses_that_do_not_go_with_the_ranges_are_rejected() -> None:
    ranges = np.array([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="2"):
        chunk_credit([1.0], [1.0, 1.0], ranges)
    with pytest.raises(IndexError):
        chunk_credit([1.0, 1.0], [1.0], ranges)
    for aggregation in ("max", "sum"):
        with pytest.raises(IndexError):
            aggregate_losses([1.0], ranges, aggregation)
    for aggregation in ("median", "share"):
        with pytest.raises(ValueError, match="aggregation"):
            aggregate_losses([1.0, 1.0], ranges, aggregation)


def test_token_without_a_range_has_no_aggregate() -> None:
    assert np.isnan(aggregate_losses([], np.array([[-1, -1]]))).all()


@pytest.mark.parametrize("aggregation", ["max", "mean", "sum", "share"])
def test_aggregates_are_those_of_guidance(aggregation: str) -> None:
    rng = np.random.default_rng(0)
    student_spans, teacher_spans = spans_of((1, 4, 5, 9, 10)), spans_of((2, 3, 6, 10))
    ranges = np.append(align_spans(student_spans, teacher_spans), [[UNMAPPED] * 2], axis=0)
    shares = covered_shares(student_spans, teacher_spans, ranges[:-1])
    shares = np.append(shares, np.ones((1, 3), np.float32), axis=0)
    losses = rng.uniform(0, 5, len(teacher_spans))
    expected, mapped = aggregate_teacher_losses(
        torch.tensor(losses[None]),
        torch.tensor(ranges[None]),
        aggregation,
        shares_BS3=torch.tensor(shares[None]),
    )
    aggregated = aggregate_losses(losses, ranges, aggregation, shares)
    np.testing.assert_allclose(aggregated[:-1], expected[0, :-1], rtol=1e-6)
    assert np.isnan(aggregated[-1])
    assert mapped[0].tolist() == [True] * 5 + [False]
