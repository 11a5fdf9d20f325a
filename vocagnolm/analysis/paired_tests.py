"""Whether two runs differ, told from what each made of the same items.

Only items on which exactly one of the two is right speak about a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Discordance:
    """Items asked of two runs, and those on which one was right and the other wrong.

    Attributes:
        n: items, at least 1.
        only_first: the first run alone was right.
        only_other: the other run alone was right.
    """

    n: int
    only_first: int
    only_other: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[bool, bool]]) -> Discordance:
        """Count (first run right, other run right), one pair per item.

        >>> Discordance.of([(True, True), (True, False), (False, True), (False, True)])
        Discordance(n=4, only_first=1, only_other=2)
        """
        only_first = sum(first and not other for first, other in pairs)
        only_other = sum(other and not first for first, other in pairs)
        return cls(len(pairs), only_first, only_other)

    @property
    def difference(self) -> float:
        """Accuracy of the other run less that of the first, in percentage points."""
        return (self.only_other - self.only_first) / self.n * 100


def mcnemar_p(only_first: int, only_other: int) -> float:
    """The exact two-sided p-value of McNemar's test.

    Under the null hypothesis each discordant item falls to either run with probability 1/2. The
    tail is summed in integers, so that no count is too large and no p-value loses digits.

    >>> mcnemar_p(1, 5), mcnemar_p(3, 3), mcnemar_p(0, 0)
    (0.21875, 1.0, 1.0)
    """
    n = only_first + only_other
    tail, ways = 0, 1
    for k in range(min(only_first, only_other) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << n))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down method, in the order given.

    >>> holm([0.02, 0.01, 0.5])
    [0.04, 0.03, 0.5]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def resampled_differences(
    counts: Discordance, resamples: int, seed: int | Sequence[int]
) -> FloatArray:
    """Differences in percentage points, each from n items drawn with replacement.

    An item says one of three things, so what n draws say is one multinomial draw: the very
    distribution of a paired bootstrap over items, without drawing items.

    Args:
        counts: of the items.
        resamples: R, at least 1.
        seed: as `numpy.random.default_rng` takes it.

    Returns:
        float64 [R].
    """
    agreed = counts.n - counts.only_first - counts.only_other
    shares = np.array([counts.only_first, counts.only_other, agreed]) / counts.n
    drawn = np.random.default_rng(seed).multinomial(counts.n, shares, size=resamples)
    return (drawn[:, 1] - drawn[:, 0]) / counts.n * 100


def percentile_interval(values: FloatArray) -> tuple[float, float]:
    """The central 95 % of resampled values.

    With few discordant items it is too narrow, and with none it has no width: the test's p-value
    is exact there, and the interval is not.
    """
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
