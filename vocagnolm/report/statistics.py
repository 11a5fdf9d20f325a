"""Paired statistics: whether two runs differ, judged by what each made of the same items.

Only items on which exactly one of the two is right speak about a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.runs import Items, Row, Run, heading, in_order

RESAMPLES = 10_000
_Floats = npt.NDArray[np.float64]
_PAIRING = "first other column points low high items only_first only_other p p_holm not_paired"


def pair(first: Run, other: Run) -> list[Row]:
    """Compare a run with a baseline, the first, on the items of the benchmarks that both have.

    Returns a row for each benchmark and average: the difference of the exact accuracies in points
    with its 95 % interval; of a benchmark also the items, those that one run alone answered right,
    McNemar's p, and p corrected by Holm. What cannot be paired has the reason instead.
    """
    rows: list[Row] = []
    # {benchmark: (difference in points, resampled differences)}
    differences: dict[str, tuple[float, _Floats]] = {}
    shared = {x["column"] for x in first.scores} & {x["column"] for x in other.scores}
    # Averages come behind their members.
    for name in in_order(shared):
        row: Row = dict.fromkeys(_PAIRING.split())
        row |= {"first": first.label, "other": other.label, "column": name}
        rows.append(row)
        if name in AVERAGES:
            members = AVERAGES[name]
            if missing := [heading(member) for member in members if member not in differences]:
                row["not_paired"] = f"{', '.join(missing)} not paired"
                continue
            row["points"] = sum(differences[member][0] for member in members) / len(members)
            # Each benchmark is resampled on its own, as its items were drawn on their own.
            sample = np.mean([differences[member][1] for member in members], axis=0)
        else:
            ours, theirs = first.items(name), other.items(name)
            if reason := _unlike(first.conditions[name], other.conditions[name], ours, theirs):
                row["not_paired"] = reason
                continue
            only_first = sum(ours[idx][0] and not theirs[idx][0] for idx in ours)
            only_other = sum(theirs[idx][0] and not ours[idx][0] for idx in ours)
            row |= {"items": len(ours), "only_first": only_first, "only_other": only_other}
            row["points"] = (only_other - only_first) / len(ours) * 100
            row["p"] = mcnemar_p(only_first, only_other)
            # A benchmark has a seed of its own, so that its interval does not depend on the others.
            own_seed = [0, *name.encode()]
            sample = resampled_differences(len(ours), only_first, only_other, RESAMPLES, own_seed)
            differences[name] = row["points"], sample
        row["low"], row["high"] = percentile_interval(sample)
    tested = [row for row in rows if row["p"] is not None]
    for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    return rows


def _unlike(first: Row, other: Row, ours: Items, theirs: Items) -> str:
    """Return why the items of two runs are not the same, by conditions and items; "" if so."""
    if differing := [name for name in first if first[name] != other[name]]:
        return f"other {', '.join(differing)}"
    if ours.keys() != theirs.keys():
        shared = len(ours.keys() & theirs.keys())
        return f"other items: {len(ours)} and {len(theirs)}, shared {shared}"
    # Items are paired by `idx`, in whatever order they were asked.
    if changed := sum(ours[idx][1:] != theirs[idx][1:] for idx in ours):
        return f"other prompts or golds of {changed} items"
    return ""


def mcnemar_p(only_first: int, only_other: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    >>> mcnemar_p(1, 5), mcnemar_p(3, 3), mcnemar_p(0, 0)
    (0.21875, 1.0, 1.0)
    """
    n = only_first + only_other
    # Summed in integers: no count is too large, and no p-value loses digits.
    tail = sum(math.comb(n, k) for k in range(min(only_first, only_other) + 1))
    return min(1.0, 2 * tail / (1 << n))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's step-down method, in the order given.

    >>> holm([0.02, 0.01, 0.5])
    [0.04, 0.03, 0.5]
    """
    # From the smallest p-value: times the number of those not yet passed, never falling.
    order = np.argsort(p_values, kind="stable")
    scaled = np.arange(len(order), 0, -1) * np.asarray(p_values)[order]
    corrected = np.empty(len(order))
    corrected[order] = np.maximum.accumulate(np.minimum(scaled, 1))
    return [float(p) for p in corrected]


def resampled_differences(
    items: int, only_first: int, only_other: int, resamples: int, seed: int | Sequence[int]
) -> _Floats:
    """Return differences in percentage points [resamples], each over items with replacement."""
    # An item says one of three things, so n draws are one multinomial draw: the very distribution
    # of a paired bootstrap over items, without drawing items.
    shares = np.array([only_first, only_other, items - only_first - only_other]) / items
    drawn = np.random.default_rng(seed).multinomial(items, shares, size=resamples)
    return (drawn[:, 1] - drawn[:, 0]) / items * 100


def percentile_interval(values: _Floats) -> tuple[float, float]:
    """Return the central 95 % of resampled values; with few discordant items it is too narrow."""
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
