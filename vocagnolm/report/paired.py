"""Paired statistics: whether two runs differ, judged by what each made of the same items.

Only items on which exactly one of the two is right speak about a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.runs import Run, heading, reject

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Discordance:
    """Items asked of two runs (at least one), and those that one run alone answered right."""

    n: int
    only_first: int
    only_other: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Discordance:
        """Count (first run right, other run right), one pair per item.

        >>> Discordance.of([(True, True), (True, False), (False, True), (False, True)])
        Discordance(n=4, only_first=1, only_other=2)
        """
        return cls(len(pairs), pairs.count((True, False)), pairs.count((False, True)))

    @property
    def difference(self) -> float:
        """Accuracy of the other run less that of the first, in percentage points."""
        return (self.only_other - self.only_first) / self.n * 100


@dataclass(frozen=True)
class Difference:
    """Lead of the other run over the first, on the same items."""

    # Difference of the exact accuracies, in percentage points.
    points: float
    # 95 %, by the paired bootstrap.
    interval: tuple[float, float]
    # None for an average, as are both p-values.
    counts: Discordance | None = None
    # McNemar's, exact and two-sided.
    p: float | None = None
    # Corrected for the number of benchmarks that the two runs are compared on.
    p_holm: float | None = None


@dataclass(frozen=True)
class Pairing:
    """Two runs by label, their differences by column, and by column the reason for none."""

    first: str
    other: str
    differences: Mapping[str, Difference]
    refused: Mapping[str, str]


def pair(first: Run, other: Run, resamples: int, seed: int) -> Pairing:
    """Compare a run with a baseline, the first, on the items of the benchmarks that both have.

    Raises:
        ValueError: there is no such benchmark, or a file of items is missing or damaged.
    """
    both = {name: _discordance(first, other, name) for name in first.counts if name in other.counts}
    if not both:
        expected = f"{first.label} and {other.label} to share a benchmark"
        found = f"{', '.join(first.counts)} and {', '.join(other.counts)}"
        reject(expected, found, "compare others")
    refused = {name: reason for name, reason in both.items() if isinstance(reason, str)}
    counts = {name: count for name, count in both.items() if isinstance(count, Discordance)}
    # A benchmark has a seed of its own, so that its interval does not depend on the others.
    samples = {
        name: resampled_differences(count, resamples, [seed, *name.encode()])
        for name, count in counts.items()
    }
    p_values = [mcnemar_p(count.only_first, count.only_other) for count in counts.values()]
    differences = {
        name: Difference(count.difference, percentile_interval(samples[name]), count, p, p_holm)
        for (name, count), p, p_holm in zip(counts.items(), p_values, holm(p_values), strict=True)
    }
    for average, members in AVERAGES.items():
        if not all(average in (row["column"] for row in run.scores) for run in (first, other)):
            continue
        if missing := [heading(name) for name in members if name not in counts]:
            refused[average] = f"{', '.join(missing)} not paired"
        else:
            # Each benchmark is resampled on its own, as its items were drawn on their own.
            points = sum(counts[name].difference for name in members) / len(members)
            means = np.mean([samples[name] for name in members], axis=0)
            differences[average] = Difference(points, percentile_interval(means))
    return Pairing(first.label, other.label, differences, refused)


def _discordance(first: Run, other: Run, benchmark: str) -> Discordance | str:
    """Count where two runs differ, or say why their items are not the same."""
    ours, theirs = first.items(benchmark), other.items(benchmark)
    conditions = other.conditions[benchmark]
    differing = [k for k, x in first.conditions[benchmark].items() if x != conditions[k]]
    if differing:
        return f"other {', '.join(differing)}"
    if ours.keys() != theirs.keys():
        return f"other items: {len(ours)} and {len(theirs)}, shared {len(ours.keys() & theirs)}"
    # Items are paired by `idx`, in whatever order they were asked.
    if changed := sum(ours[i][1:] != theirs[i][1:] for i in ours):
        return f"other prompts or golds of {changed} items"
    return Discordance.of([(ours[i][0], theirs[i][0]) for i in ours])


def mcnemar_p(only_first: int, only_other: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Under the null hypothesis each discordant item falls to either run with probability 1/2.

    >>> mcnemar_p(1, 5), mcnemar_p(3, 3), mcnemar_p(0, 0)
    (0.21875, 1.0, 1.0)
    """
    n = only_first + only_other
    # Summed in integers: no count is too large, and no p-value loses digits.
    tail, ways = 0, 1
    for k in range(min(only_first, only_other) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
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
    counts: Discordance, resamples: int, seed: int | Sequence[int]
) -> _Floats:
    """Return differences in percentage points [resamples], each from n items with replacement."""
    # An item says one of three things, so n draws are one multinomial draw: the very distribution
    # of a paired bootstrap over items, without drawing items.
    agreed = counts.n - counts.only_first - counts.only_other
    shares = np.array([counts.only_first, counts.only_other, agreed]) / counts.n
    drawn = np.random.default_rng(seed).multinomial(counts.n, shares, size=resamples)
    return (drawn[:, 1] - drawn[:, 0]) / counts.n * 100


def percentile_interval(values: _Floats) -> tuple[float, float]:
    """Return the central 95 % of resampled values.

    With few discordant items it is too narrow, and with none it has no width: the test's p-value
    is exact there, and the interval is not.
    """
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
