"""Numbers of the table: rounding, intervals, averages, and avg@k and pass@k by hand."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from vocagnolm.evaluation.accuracy import (
    Z_95,
    accuracy,
    average,
    averages,
    interval_over_items,
    one_line_summary,
    pass_at_k,
    sampled_accuracy,
    summarize,
    wilson_interval,
)
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, PAPER_BENCHMARKS


def solve_score_equation(share: float, n: int, low: float, high: float) -> float:
    """Solve (share - p)^2 = z^2 p (1 - p) / n for p between two shares, by bisection."""

    def excess(p: float) -> float:
        return (share - p) ** 2 - Z_95**2 * p * (1 - p) / n

    rises = excess(high) > excess(low)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if (excess(middle) > 0) == rises else (middle, high)
    return (low + high) / 2


@pytest.mark.parametrize("n", [1, 2, 7, 32, 500, 3018])
def test_wilson_interval_solves_the_score_equation(n: int) -> None:
    for correct in {0, 1, n // 3, n // 2, n - 1, n} & set(range(n + 1)):
        share = correct / n
        low = 0.0 if correct == 0 else solve_score_equation(share, n, 0.0, share)
        high = 1.0 if correct == n else solve_score_equation(share, n, share, 1.0)
        found = wilson_interval(correct, n)
        assert found == pytest.approx((100 * low, 100 * high), abs=1e-9)
        assert 0 <= found[0] <= 100 * share <= found[1] <= 100


@pytest.mark.parametrize(
    ("correct", "n", "expected"),
    [(10, 32, 31.2), (18, 32, 56.2), (14, 32, 43.8), (1, 3, 33.3), (0, 5, 0.0), (38, 500, 7.6)],
)
def test_accuracy_rounds_halves_to_even(correct: int, n: int, expected: float) -> None:
    assert accuracy(correct, n)["rounded"] == expected
    assert accuracy(correct, n)["exact"] == correct / n * 100


def test_average_is_of_rounded_and_of_exact_columns() -> None:
    found = average([accuracy(10, 32), accuracy(1, 3)])
    assert found["rounded"] == 32.2  # (31.2 + 33.3) / 2 = 32.25, to the even digit
    assert found["exact"] == pytest.approx((31.25 + 100 / 3) / 2)
    # The harness prints 0.15 as it prints any float, and does not round it by NumPy.
    columns = [{"rounded": value, "exact": 0.0, "interval": (0.0, 0.0)} for value in (0.3, 0.0)]
    assert average(columns)["rounded"] == float(f"{0.3 / 2:.1f}") != np.round(0.3 / 2, 1)


def test_average_interval_puts_columns_together() -> None:
    first = {"rounded": 20.0, "exact": 20.0, "interval": (14.0, 32.0)}
    other = {"rounded": 50.0, "exact": 50.0, "interval": (42.0, 55.0)}
    # Below: sqrt(6^2 + 8^2) / 2 = 5; above: sqrt(12^2 + 5^2) / 2 = 6.5.
    assert average([first, other])["interval"] == pytest.approx([30.0, 41.5])


def test_averages_are_the_three_of_the_paper() -> None:
    columns = {name: accuracy(at, 10) | {"marked": []} for at, name in enumerate(PAPER_BENCHMARKS)}
    found = averages(columns)
    assert list(found) == ["AVG", "AVG w/o TAB, MMLU-STEM, SAT", "AVG w/o SAT"]
    assert [len(AVERAGES[name]) for name in found] == [9, 6, 8]
    # Columns are 0, 10, ..., 80 in the paper's order; TAB is 50, MMLU-STEM 70, SAT 80.
    assert [value["rounded"] for value in found.values()] == [40.0, 26.7, 35.0]
    del columns["sat"]
    assert list(averages(columns)) == ["AVG w/o TAB, MMLU-STEM, SAT", "AVG w/o SAT"]
    assert averages({"demo": accuracy(1, 2)}) == {}


def graded(
    prediction: str | None, correct: bool, decided_by: str, opinion: bool | None, **more: Any
) -> dict[str, Any]:
    verdict = {"prediction": prediction, "correct": correct, "decided_by": decided_by}
    return {**verdict, "math_verify": opinion, **more}


def test_summary_counts_what_the_graders_say() -> None:
    records = [
        graded("3", True, "string", True),
        graded("", False, "empty", False),
        graded(None, False, "crash", None),
        graded("placeholder", False, "choice", None),
        graded("3.0", True, "numeric", False),
    ]
    found = summarize(records)
    assert (found["correct"], found["n"], found["rounded"]) == (2, 5, 40.0)
    assert found["unanswered"] == pytest.approx(3 / 5)
    assert found["decided_by"] == {"choice": 1, "crash": 1, "empty": 1, "numeric": 1, "string": 1}
    assert (found["math_verify"]["correct"], found["math_verify"]["n"]) == (1, 5)
    assert found["math_verify"]["without_opinion"] == 2
    assert found["math_verify"]["agreement"] == pytest.approx(2 / 3)
    assert "finish_reasons" not in found
    assert "1 not graded" in one_line_summary(found)
    assert "not graded" not in one_line_summary(summarize(records[:1]))


def test_summary_says_how_texts_ended() -> None:
    endings = [("stop", 10), ("length", 30), ("stop", 20)]
    records = []
    for reason, tokens in endings:
        ending = {"finish_reason": reason, "n_new_tokens": tokens}
        records.append(graded("A", False, "choice", None, **ending))
    found = summarize(records)
    assert found["finish_reasons"] == {"length": 1, "stop": 2}
    assert found["mean_new_tokens"] == 20
    assert "context" not in one_line_summary(found)
    ending = {"finish_reason": "context", "n_new_tokens": 5}
    cut = summarize([*records, graded("A", False, "choice", None, **ending)])
    assert one_line_summary(cut).endswith("; 1 cut where the model's context ends")
    assert found["math_verify"] is None


# Several outputs of an item


def test_pass_at_k_equals_enumeration() -> None:
    for samples in range(1, 7):
        for right, k in itertools.product(range(samples + 1), range(1, samples + 1)):
            chosen = list(itertools.combinations(range(samples), k))
            # The first outputs are the right ones.
            passes = sum(min(choice) < right for choice in chosen)
            expected = passes / len(chosen)
            assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-15)
    for samples, counts in ((6, ["2", "4", "6"]), (8, ["2", "4", "8"]), (2, ["2"])):
        assert list(sampled_accuracy([1], samples)["pass_at"]) == counts


def test_summary_of_drawn_outputs_equals_a_count_by_hand() -> None:
    """5 of 12 outputs are right: 4, 1 and 0 of an item; math-verify accepts one more."""
    records = []
    for idx, marks in enumerate(("++++", "-+--", "---o")):
        for mark in marks:
            records.append(graded("1", mark == "+", "string", mark != "-", idx=idx))
    random.Random(0).shuffle(records)
    found = summarize(records)
    assert (found["n"], found["samples"], found["correct"]) == (3, 4, 5)
    assert found["exact"] == pytest.approx(500 / 12)
    assert found["rounded"] == 41.7
    passes = {k: entry["exact"] for k, entry in found["pass_at"].items()}
    # Of the second item's six pairs, three hold its right output.
    assert passes == pytest.approx({"2": 150 / 3, "4": 200 / 3})
    assert found["pass_at"]["4"]["interval"] == pytest.approx(wilson_interval(2, 3))
    # Of three items alike, all outputs count: 5 of 6 pairs of each item have one of its two.
    alike = sampled_accuracy([2, 2, 2], 4)["pass_at"]["2"]
    assert alike["interval"] == pytest.approx(wilson_interval(10, 12))
    assert (found["math_verify"]["correct"], found["math_verify"]["exact"]) == (6, 50.0)
    assert found["math_verify"]["agreement"] == pytest.approx(11 / 12)
    line = one_line_summary(found)
    assert line.startswith("avg@4 41.7 (95 % interval ")
    assert line.endswith(", pass@4 66.7, 5 of 12 right")


@pytest.mark.parametrize(
    ("shares", "samples", "right", "independent"),
    [
        ([1, 0, 0, 1, 0], 1, 2, 5),
        # Outputs that all repeat the first say nothing new.
        ([1, 0, 0, 1, 0], 64, 2, 5),
        # Mean 1/2, variance (1/16 + 1/16) / 4 = 1/32, so 4 x 1/4 / (1/32) = 32 outputs.
        ([1 / 4, 1 / 2, 1 / 2, 3 / 4], 100, 16, 32),
        # Never more than there are.
        ([1 / 4, 1 / 2, 1 / 2, 3 / 4], 4, 8, 16),
        ([0.5] * 6, 2, 6, 12),
        # If none is right, only the items count, as an item's outputs might all be alike.
        ([0, 0, 0], 64, 0, 3),
        ([1, 1, 1], 64, 3, 3),
    ],
)
def test_interval_is_wilsons_for_as_many_independent_outputs(
    shares: list[float], samples: int, right: int, independent: int
) -> None:
    expected = pytest.approx(wilson_interval(right, independent))
    assert interval_over_items(shares, samples) == expected


@pytest.mark.parametrize("samples", [1, 16])
def test_interval_covers_the_truth_when_items_differ(samples: int) -> None:
    """Where Wilson's interval over all outputs covers it in about half of the cases."""
    rng = np.random.default_rng(0)
    covered = naive = 0
    for _ in range(500):
        right = rng.binomial(samples, rng.beta(0.5, 0.5, 100))
        low, high = interval_over_items(list(right / samples), samples)
        covered += low <= 50 <= high
        low, high = wilson_interval(int(right.sum()), 100 * samples)
        naive += low <= 50 <= high
    assert 0.92 <= covered / 500 <= 0.98
    assert (naive / 500 < 0.6) == (samples == 16)
