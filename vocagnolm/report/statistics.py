"""Paired statistics: whether two runs differ, judged by their outputs for the same items.

Only items on which one of them has more right outputs say anything about a difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.paper import Row
from vocagnolm.report.runs import Items, Run, conditions_that_differ, heading, in_order

RESAMPLES = 10_000
_Floats = npt.NDArray[np.float64]
PAIRING = (
    "first other column points low high items only_first only_other p p_holm not_paired"
).split()


def pair(first: Run, other: Run) -> list[Row]:
    """Compare a run with the baseline, the first, on the items of common benchmarks.

    Returns a row for each benchmark and average: the difference of the exact accuracies in points
    with its 95 % interval. A benchmark's row also has the items, those on which one run has more
    right outputs, p (McNemar's, or the sign-flip test's for several outputs), and p corrected by
    Holm. What cannot be paired has the reason instead.
    """
    rows: list[Row] = []
    # {benchmark: (difference in points, resampled differences)}
    differences: dict[str, tuple[float, _Floats]] = {}
    first_columns = {score["column"] for score in first.scores}
    other_columns = {score["column"] for score in other.scores}
    # Averages come after their members in this order, so that their differences exist.
    for name in in_order(first_columns & other_columns):
        row: Row = dict.fromkeys(PAIRING)
        row |= {"first": first.label, "other": other.label, "column": name}
        rows.append(row)
        if name in AVERAGES:
            members = AVERAGES[name]
            missing = [heading(member) for member in members if member not in differences]
            if missing:
                row["not_paired"] = f"{', '.join(missing)} not paired"
                continue
            row["points"] = sum(differences[member][0] for member in members) / len(members)
            # Each benchmark is resampled separately, because its items were drawn separately.
            sample = np.mean([differences[member][1] for member in members], axis=0)
        else:
            first_items = first.items(name)
            other_items = other.items(name)
            reason = _why_not_paired(
                first.conditions[name], other.conditions[name], first_items, other_items
            )
            if reason:
                row["not_paired"] = reason
                continue
            gains = _gains(first_items, other_items)
            count = len(first_items)
            only_first = sum(items for gain, items in gains.items() if gain < 0)
            only_other = sum(items for gain, items in gains.items() if gain > 0)
            row |= {"items": count, "only_first": only_first, "only_other": only_other}
            more_right = sum(gain * items for gain, items in gains.items())
            row["points"] = more_right / (count * first.samples) * 100
            is_single = first.samples == 1
            row["p"] = mcnemar_p(only_first, only_other) if is_single else sign_flip_p(gains)
            # Each benchmark has its own seed, so its interval does not depend on which other
            # benchmarks were evaluated.
            seed = [0, *name.encode()]
            sample = resampled_differences(gains, RESAMPLES, seed) / first.samples
            differences[name] = row["points"], sample
        row["low"], row["high"] = percentile_interval(sample)
    # Averages have no test of their own, so Holm's correction counts only benchmarks.
    tested = [row for row in rows if row["p"] is not None]
    corrected = holm([row["p"] for row in tested])
    for row, p in zip(tested, corrected, strict=True):
        row["p_holm"] = p
    return rows


def _why_not_paired(
    first_conditions: Row, other_conditions: Row, first_items: Items, other_items: Items
) -> str:
    """Return why the items of two runs cannot be paired, or "" if they can."""
    differing = conditions_that_differ(first_conditions, other_conditions)
    if differing:
        return f"other {', '.join(differing)}"
    if first_items.keys() != other_items.keys():
        shared = len(first_items.keys() & other_items.keys())
        return f"other items: {len(first_items)} and {len(other_items)}, shared {shared}"
    # Items are paired by `idx`, in whatever order they were asked. Prompt and gold must be equal.
    changed = sum(first_items[idx][1:] != other_items[idx][1:] for idx in first_items)
    if changed:
        return f"other prompts or golds of {changed} items"
    return ""


def _gains(first_items: Items, other_items: Items) -> dict[int, int]:
    """Count items by how many more of their outputs the other run has right."""
    # Gains of single outputs are always present, in this order, because a bootstrap's draws follow
    # it.
    gains = {-1: 0, 1: 0, 0: 0}
    for idx in first_items:
        gain = other_items[idx][0] - first_items[idx][0]
        gains[gain] = gains.get(gain, 0) + 1
    return gains


def mcnemar_p(only_first: int, only_other: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    >>> mcnemar_p(1, 5), mcnemar_p(3, 3), mcnemar_p(0, 0)
    (0.21875, 1.0, 1.0)
    """
    n = only_first + only_other
    # Without a difference, an item that only one run has right is equally likely to be either
    # run's. The tail has the results that are at least this uneven on this side, and counts twice,
    # for both sides. It is summed in integers, so no count is too large and no p-value loses
    # digits.
    fewer = min(only_first, only_other)
    tail = sum(math.comb(n, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / (1 << n))


def sign_flip_p(gains: Mapping[int, int]) -> float:
    """Return the exact two-sided p-value of the sign-flip test over items, from {gain: items}.

    For single outputs, with gains of -1, 0 and 1, it is McNemar's.

    >>> sign_flip_p({-1: 1, 1: 5, 0: 9}), sign_flip_p({2: 1, 4: 1, -1: 1})
    (0.21875, 0.5)
    """
    observed = abs(sum(gain * items for gain, items in gains.items()))
    # Without a difference, an item's outputs are equally likely to be either run's, so its gain has
    # either sign. The array has the probability of each sum, from the smallest to its opposite.
    probabilities = np.ones(1)
    for gain, items in gains.items():
        for _ in range(items if gain else 0):
            wider = np.zeros(len(probabilities) + 2 * abs(gain))
            wider[: len(probabilities)] += probabilities / 2
            wider[2 * abs(gain) :] += probabilities / 2
            probabilities = wider
    half = len(probabilities) // 2
    sums = np.arange(-half, half + 1)
    return min(1.0, float(probabilities[abs(sums) >= observed].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method, in the given order.

    >>> holm([0.02, 0.01, 0.5])
    [0.04, 0.03, 0.5]
    """
    # The smallest of n p-values is multiplied by n, the next by n - 1, and so on. A corrected value
    # is never below the one before.
    order = np.argsort(p_values, kind="stable")
    scaled = np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1))
    return [float(p) for p in corrected]


def resampled_differences(
    gains: Mapping[int, int], resamples: int, seed: int | Sequence[int]
) -> _Floats:
    """Return 100 times the mean gain [resamples] of {gain: items}, items drawn with replacement."""
    # Items with the same gain are a group. Drawing n items with replacement is then one multinomial
    # draw, with the same distribution as a bootstrap of the items.
    counts = np.array(list(gains.values()))
    items = int(counts.sum())
    drawn = np.random.default_rng(seed).multinomial(items, counts / items, size=resamples)
    means: _Floats = drawn @ np.array(list(gains)) / items * 100
    return means


def percentile_interval(values: _Floats) -> tuple[float, float]:
    """Return the central 95 % of resampled values. With few discordant items it is too narrow."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
