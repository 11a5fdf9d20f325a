"""What sets a run apart from another over the same items, and from the paper's reported numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vocagnolm.analysis.paired_tests import (
    Discordance,
    FloatArray,
    holm,
    mcnemar_p,
    percentile_interval,
    resampled_differences,
)
from vocagnolm.analysis.runs import Graded, ReportedRow, Run, heading
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES


@dataclass(frozen=True)
class Difference:
    """What the other run is better by than the first, over the same items.

    Attributes:
        points: difference of the exact accuracies, in percentage points.
        interval: of 95 %, by the paired bootstrap.
        counts: items and discordant items; None for an average, as is all below.
        p: McNemar's, exact and two-sided.
        p_holm: corrected for the number of benchmarks that the two runs are compared on.
    """

    points: float
    interval: tuple[float, float]
    counts: Discordance | None = None
    p: float | None = None
    p_holm: float | None = None


@dataclass(frozen=True)
class Pairing:
    """Two runs over the same items.

    Attributes:
        first: label of the run that is compared with.
        other: label of the run that is compared.
        differences: by column.
        refused: by column, why it is not paired.
    """

    first: str
    other: str
    differences: Mapping[str, Difference]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class AgainstReported:
    """One number of a run beside the paper's.

    Attributes:
        ours: as the harness rounds it, like the reported one; in percent.
        marked: as in `Accuracy`.
        reported: as printed.
        points: ours less reported, in percentage points.
        inside: whether the reported number lies in our 95 % interval.
    """

    run: str
    row: str
    column: str
    ours: float
    interval: tuple[float, float]
    marked: tuple[str, ...]
    reported: float
    points: float
    inside: bool


def pair(first: Run, other: Run, resamples: int, seed: int) -> Pairing:
    """Compare two runs on the items of the benchmarks that both have.

    Args:
        first: what is compared with.
        other: what is compared.
        resamples: of the paired bootstrap, at least 1.
        seed: of the same.

    Raises:
        ValueError: there is no such benchmark, or a file of items is missing or damaged.
    """
    shared = [name for name in first.counts if name in other.counts]
    if not shared:
        raise ValueError(
            f"expected {first.label} and {other.label} to share a benchmark, found "
            f"{', '.join(first.counts)} and {', '.join(other.counts)}: compare others"
        )
    counts: dict[str, Discordance] = {}
    refused: dict[str, str] = {}
    for name in shared:
        ours, theirs = first.items(name), other.items(name)
        refusal = _refusal(first.conditions[name], other.conditions[name], ours, theirs)
        if refusal:
            refused[name] = refusal
        else:
            counts[name] = Discordance.of([(ours[i].correct, theirs[i].correct) for i in ours])
    samples = {  # a benchmark's own seed, so that its interval does not hang on the others
        name: resampled_differences(count, resamples, [seed, *name.encode()])
        for name, count in counts.items()
    }
    p_values = [mcnemar_p(count.only_first, count.only_other) for count in counts.values()]
    differences = {
        name: Difference(count.difference, percentile_interval(samples[name]), count, p, p_holm)
        for (name, count), p, p_holm in zip(counts.items(), p_values, holm(p_values), strict=True)
    }
    for average in AVERAGES:
        if average in first.accuracies and average in other.accuracies:
            missing = [heading(name) for name in AVERAGES[average] if name not in counts]
            if missing:
                refused[average] = f"{', '.join(missing)} not paired"
            else:
                differences[average] = _average(average, counts, samples)
    return Pairing(first.label, other.label, differences, refused)


def _average(
    average: str, counts: Mapping[str, Discordance], samples: Mapping[str, FloatArray]
) -> Difference:
    """Every benchmark is resampled on its own, as its items were drawn on their own."""
    members = AVERAGES[average]
    points = sum(counts[name].difference for name in members) / len(members)
    means = np.mean([samples[name] for name in members], axis=0)
    return Difference(points, percentile_interval(means))


def _refusal(
    first: Mapping[str, Any],
    other: Mapping[str, Any],
    ours: Mapping[int, Graded],
    theirs: Mapping[int, Graded],
) -> str | None:
    """Why the items of two runs are not the same; None where they are."""
    differing = [name for name in first if first[name] != other[name]]
    if differing:
        return f"other {', '.join(differing)}"
    if ours.keys() != theirs.keys():
        return f"other items: {len(ours)} and {len(theirs)}, shared {len(ours.keys() & theirs)}"
    changed = sum(ours[idx].asked != theirs[idx].asked for idx in ours)
    return f"other prompts or golds of {changed} items" if changed else None


def beside_reported(run: Run, row: ReportedRow) -> list[AgainstReported]:
    """Put the columns of a run beside those of a reported row.

    Raises:
        ValueError: they share none.
    """
    shared = [column for column in run.accuracies if column in row.values]
    if not shared:
        raise ValueError(
            f"expected {run.label} to share a column with the reported {row.name!r}, found "
            f"{', '.join(run.accuracies)}: evaluate the paper's benchmarks or leave it out"
        )
    lines = []
    for column in shared:
        ours, value = run.accuracies[column], row.values[column]
        low, high = ours.interval
        lines.append(
            AgainstReported(
                run=run.label,
                row=row.name,
                column=column,
                ours=ours.rounded,
                interval=ours.interval,
                marked=ours.marked,
                reported=value,
                points=round(ours.rounded - value, 1),
                inside=low <= value <= high,
            )
        )
    return lines
