"""Paired statistics: whether two runs differ, judged by their outputs for the same items.

Only items on which one of them has more right outputs say anything about a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.evaluations import Evaluation, Item, heading, in_order

RESAMPLES = 10_000
_Floats = npt.NDArray[np.float64]


@dataclass
class Pairing:
    """How an evaluation differs from the first one, in one column."""

    first: str
    other: str
    column: str
    # A difference may not be compared with published ones if one of its two numbers may not.
    marked: bool
    # The difference of the exact accuracies in points, with its 95 % interval.
    points: float | None = None
    low: float | None = None
    high: float | None = None
    # Only of benchmarks: all items, and those on which one of the two has more right outputs.
    items: int | None = None
    only_first: int | None = None
    only_other: int | None = None
    # p of the sign-flip test, which is McNemar's for single outputs; and p corrected by Holm.
    p: float | None = None
    p_holm: float | None = None
    # If a column cannot be paired, it has the reason instead of numbers.
    not_paired: str | None = None


def pair(first: Evaluation, other: Evaluation) -> list[Pairing]:
    """Compare an evaluation with the baseline, the first, in all columns that both have."""
    pairings: dict[str, Pairing] = {}
    # The resampled differences in points, by benchmark.
    samples: dict[str, _Floats] = {}
    marked = {score["column"]: bool(score["marked"]) for score in first.scores}
    other_marked = {score["column"]: bool(score["marked"]) for score in other.scores}
    # Averages come after their members in this order, so that their differences exist.
    for name in in_order(marked.keys() & other_marked.keys()):
        is_marked = marked[name] or other_marked[name]
        pairing = Pairing(first.label, other.label, name, is_marked)
        pairings[name] = pairing
        if name not in AVERAGES:
            _pair_benchmark(pairing, samples, first, other)
            continue
        members = AVERAGES[name]
        missing = [heading(member) for member in members if member not in samples]
        if missing:
            pairing.not_paired = f"{', '.join(missing)} not paired"
            continue
        pairing.points = sum(pairings[member].points or 0 for member in members) / len(members)
        # Each benchmark is resampled separately, because its items were drawn separately.
        sample = np.mean([samples[member] for member in members], axis=0)
        pairing.low, pairing.high = percentile_interval(sample)
    # Averages have no test of their own, so Holm's correction counts only benchmarks.
    tested = [pairings[name] for name in samples]
    corrected = holm([pairing.p or 0 for pairing in tested])
    for pairing, p_holm in zip(tested, corrected, strict=True):
        pairing.p_holm = p_holm
    return list(pairings.values())


def _pair_benchmark(
    pairing: Pairing, samples: dict[str, _Floats], first: Evaluation, other: Evaluation
) -> None:
    """Fill in the pairing of a benchmark, and add its resampled differences."""
    name = pairing.column
    first_items = first.items(name)
    other_items = other.items(name)
    settings, other_settings = first.settings[name], other.settings[name]
    pairing.not_paired = _why_not_paired(settings, other_settings, first_items, other_items)
    if pairing.not_paired:
        return
    gains = _gains(first_items, other_items)
    pairing.items = len(first_items)
    pairing.only_first = sum(items for gain, items in gains.items() if gain < 0)
    pairing.only_other = sum(items for gain, items in gains.items() if gain > 0)
    more_right = sum(gain * items for gain, items in gains.items())
    pairing.points = more_right / (pairing.items * first.samples) * 100
    pairing.p = sign_flip_p(gains)
    # Each benchmark has its own seed, so its interval does not depend on which other benchmarks
    # were evaluated.
    sample = resampled_differences(gains, RESAMPLES, [0] + list(name.encode())) / first.samples
    pairing.low, pairing.high = percentile_interval(sample)
    samples[name] = sample


def _why_not_paired(
    settings: Mapping[str, object],
    other_settings: Mapping[str, object],
    first_items: Mapping[int, Item],
    other_items: Mapping[int, Item],
) -> str | None:
    """Return why the items of two evaluations cannot be paired, or None if they can."""
    names = settings.keys() | other_settings.keys()
    differing = [name for name in names if settings.get(name) != other_settings.get(name)]
    if differing:
        return f"other {', '.join(sorted(differing))}"
    if first_items.keys() != other_items.keys():
        shared = len(first_items.keys() & other_items.keys())
        return f"other items: {len(first_items)} and {len(other_items)}, shared {shared}"
    # Items are paired by `idx`, in whatever order they were asked. Prompt and gold must be equal.
    changed = sum(first_items[idx][1:] != other_items[idx][1:] for idx in first_items)
    if changed:
        return f"other prompts or golds of {changed} items"
    return None


def _gains(first_items: Mapping[int, Item], other_items: Mapping[int, Item]) -> dict[int, int]:
    """Count items by how many more of their outputs the other evaluation has right."""
    # Gains of single outputs are always present, in this order, because a bootstrap's draws follow
    # it.
    gains = {-1: 0, 1: 0, 0: 0}
    for idx, item in first_items.items():
        gain = other_items[idx].right_outputs - item.right_outputs
        gains[gain] = gains.get(gain, 0) + 1
    return gains


def sign_flip_p(gains: Mapping[int, int]) -> float:
    """Return the exact two-sided p-value of the sign-flip test over items, from {gain: items}.

    For single outputs, with gains of -1, 0 and 1, it is McNemar's exact test.

    >>> sign_flip_p({-1: 1, 1: 5, 0: 9}), sign_flip_p({2: 1, 4: 1, -1: 1}), sign_flip_p({})
    (0.21875, 0.5, 1.0)
    """
    observed = abs(sum(gain * items for gain, items in gains.items()))
    # Without a difference, an item's outputs are equally likely to be either run's, so its gain has
    # either sign. The array has the probability of each sum, from the smallest to its opposite.
    probabilities = np.ones(1)
    for gain, items in gains.items():
        signs = np.zeros(2 * abs(gain) + 1)
        signs[[0, -1]] += 0.5
        for _ in range(items if gain else 0):
            probabilities = np.convolve(probabilities, signs)
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
