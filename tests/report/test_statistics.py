"""Paired statistics against enumeration, exact sums and drawn items."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from vocagnolm.report.statistics import (
    holm,
    percentile_interval,
    resampled_differences,
    sign_flip_p,
)


@pytest.mark.parametrize(("only_first", "only_other"), [(0, 0), (3, 3), (450, 520), (1500, 1700)])
def test_sign_flips_of_single_outputs_are_mcnemars(only_first: int, only_other: int) -> None:
    n, least = only_first + only_other, min(only_first, only_other)
    expected = min(1.0, float(Fraction(2 * sum(comb(n, k) for k in range(least + 1)), 2**n)))
    for gains in ({-1: only_first, 1: only_other, 0: 5}, {1: only_first, -1: only_other}):
        assert sign_flip_p(gains) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "gains",
    [{3: 1, -1: 2}, {1: 3, -1: 1, 0: 4}, {4: 2, 2: 1, -3: 3}, {-2: 1, 2: 1}, {0: 3}, {5: 1}],
)
def test_sign_flips_equal_enumeration(gains: dict[int, int]) -> None:
    sizes = [abs(gain) for gain, items in gains.items() for _ in range(items)]
    observed = abs(sum(gain * items for gain, items in gains.items()))
    flips = list(itertools.product((-1, 1), repeat=len(sizes)))
    uneven = sum(abs(np.dot(signs, sizes)) >= observed for signs in flips)
    assert sign_flip_p(gains) == pytest.approx(uneven / len(flips), rel=1e-12)


def test_holm_equals_hand_computation_when_order_is_mixed() -> None:
    # Sorted: 0.005 x 4, 0.01 x 3, 0.03 x 2, then 0.04 x 1, which may not fall below 0.06.
    expected = [0.03, 0.06, 0.06, 0.02]
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(expected)
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("gains", [{-1: 12, 1: 30, 0: 58}, {-1: 15, 1: 12, 0: 30, 7: 9, -4: 24}])
def test_resampling_agrees_with_drawing_items(gains: dict[int, int]) -> None:
    ours = resampled_differences(gains, 20_000, 0)
    every = np.repeat(list(gains), list(gains.values()))
    drawn = np.random.default_rng(1).integers(0, len(every), size=(20_000, len(every)))
    theirs = every[drawn].mean(axis=1) * 100
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1.0)
    assert ours.std() == pytest.approx(theirs.std(), rel=0.03)
    assert percentile_interval(ours) == pytest.approx(percentile_interval(theirs), abs=3.0)


def test_bootstrap_interval_covers_truth_when_repeated() -> None:
    rng = np.random.default_rng(0)
    shares, covered = [0.12, 0.2, 0.68], 0
    for seed in range(400):
        gains = dict(zip((-1, 1, 0), rng.multinomial(300, shares), strict=True))
        sample = resampled_differences(gains, 1000, seed)
        low, high = percentile_interval(sample)
        covered += low <= 8.0 <= high
    assert 0.92 <= covered / 400 <= 0.98
