"""The paper's figures as numbers: which marks stand where, each with its bar and its runs.

Runs that differ in nothing but their seed are one setting, hence one mark. The paper's numbers and
ours are in lines of their own.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vocagnolm.analysis.figure_data import METHODS, Trained, measure
from vocagnolm.analysis.runs import Run

_OF_A_SEED = {"seed", "data_seed", "corpus_digest", "blocks", "teacher_losses_sha256"}
_SEED_IN_A_PATH = re.compile(r"seed[-_=]?\d+")

Setting = Sequence[Trained]  # runs that differ in nothing but their seed, at least one


@dataclass(frozen=True)
class Point:
    """A mark.

    Attributes:
        x: a number, the name of a column, or None for a level that holds everywhere.
        y: what was measured, the mean over the seeds.
        bar: from where to where: with several seeds a standard deviation to either side, with one
            the 95 % interval of its evaluation; None where neither is known.
        text: stands beside it.
        marked: why it may not be put beside a published number, as in `Accuracy`.
        seeds: how many runs it is the mean of; 0 if it is not ours.
        runs: their directories.
    """

    x: float | str | None
    y: float
    bar: tuple[float, float] | None = None
    text: str = ""
    marked: tuple[str, ...] = ()
    seeds: int = 0
    runs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """Marks that belong together.

    Attributes:
        label: in the legend; "" for none.
        points: its marks, in order.
        style: number of the marker, the shade and the dashes.
        joined: by a line.
        reported: as printed in the paper; such marks are hollow.
    """

    label: str
    points: Sequence[Point]
    style: int
    joined: bool = True
    reported: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `columns` are its places if x is a name."""

    x_label: str
    y_label: str
    lines: Sequence[Line]
    columns: Sequence[str] = ()


@dataclass(frozen=True)
class Figure:
    """One figure of the paper, drawn from runs of ours."""

    number: int
    title: str
    panels: Sequence[Panel]

    def notes(self) -> list[str]:
        """What has to be known to read it."""
        lines = [line for panel in self.panels for line in panel.lines]
        points = [point for line in lines for point in line.points]
        many = sorted({point.seeds for point in points if point.seeds > 1})
        marks = sorted({mark for point in points for mark in point.marked})
        notes = []
        if many:
            counts = " or ".join(map(str, many))
            notes.append(f"means over {counts} seeds, bars: standard deviation")
        if any(point.seeds == 1 and point.bar for point in points):
            notes.append("bars of single runs: 95 % interval of the evaluation")
        if any(point.seeds == 1 and not point.bar for point in points):
            notes.append("without a bar: one seed")
        if any(line.reported for line in lines):
            notes.append("hollow: as reported (arXiv 2503.19123v1)")
        if marks:
            notes.append(f"*: {', '.join(marks)}")
        return notes


def mark(
    runs: Sequence[Trained | Run], x: float | str | None, metric: str, text: str = ""
) -> Point:
    """The mean of a metric over runs.

    Raises:
        ValueError: one does not have it.
    """
    found = [measure(run, metric) for run in runs]
    values = [one.value for one in found]
    mean, bar = statistics.fmean(values), found[0].interval
    if len(values) > 1:
        deviation = statistics.stdev(values)
        bar = (mean - deviation, mean + deviation)
    marked = tuple(sorted({word for one in found for word in one.marked}))
    paths = tuple(str(run.path if isinstance(run, Trained) else run.directory) for run in runs)
    return Point(x, mean, bar, text, marked, len(values), paths)


def settings_of(runs: Iterable[Trained]) -> list[Setting]:
    """Gather the runs that differ in nothing but their seed; paths may differ in "seedN" too.

    Raises:
        ValueError: two runs of one setting have the same seed.
    """
    groups: dict[str, dict[str, Trained]] = {}
    for run in runs:
        group = groups.setdefault(json.dumps(_identity(run), sort_keys=True), {})
        other = group.setdefault(_seeds(run), run)
        if other is not run:
            raise ValueError(
                f"expected the runs of one setting to have seeds of their own, found {other.path} "
                f"and {run.path} with the same: leave one out"
            )
    return [list(group.values()) for group in groups.values()]


def _identity(run: Trained) -> dict[str, Any]:
    kept = {name: value for name, value in run.settings.items() if name not in _OF_A_SEED}
    return dict(json.loads(_SEED_IN_A_PATH.sub("seed", json.dumps(kept))))


def _seeds(run: Trained) -> str:
    in_paths = _SEED_IN_A_PATH.findall(json.dumps(run.settings))
    return json.dumps([run.settings.get("seed"), run.settings.get("data_seed"), in_paths])


def _differing(settings: Sequence[Setting]) -> list[str]:
    """The options in which some settings are not all the same, in the order of `run.json`."""
    identities = [_identity(setting[0]) for setting in settings]
    names = dict.fromkeys(name for identity in identities for name in identity)
    return [
        name
        for name in names
        if any(one.get(name) != identities[0].get(name) for one in identities)
    ]


def marks(settings: Iterable[Setting], x: Callable[[Trained], float], metric: str) -> list[Point]:
    """One mark for each setting, in the order of x.

    Raises:
        ValueError: two settings stand at the same x, or a run does not have the metric.
    """
    at: dict[float, Setting] = {}
    for setting in settings:
        place = x(setting[0])
        other = at.setdefault(place, setting)
        if other is not setting:
            raise ValueError(
                f"expected one setting of {label_of(setting[0])} for each mark, found "
                f"{other[0].path} and {setting[0].path}, which differ in "
                f"{', '.join(_differing([other, setting]))}: leave one out"
            )
    return [mark(at[place], place, metric) for place in sorted(at)]


def level(runs: Iterable[Trained], metric: str, style: int) -> list[Line]:
    """The level of continual pretraining, to which nothing is near or far; none without such a run.

    Raises:
        ValueError: there are several settings of it.
    """
    points = marks(settings_of(run for run in runs if run.method == "cpt"), lambda run: 0.0, metric)
    return [Line(METHODS["cpt"], [replace(point, x=None)], style) for point in points]


def label_of(run: Trained) -> str:
    """The method and the teacher."""
    return ", ".join(filter(None, (METHODS[run.method], run.teacher)))


def labels_of(settings: Sequence[Setting]) -> list[str]:
    """What tells settings apart: method and teacher, and where these do not, what differs."""
    labels = []
    for setting in settings:
        alike = [other for other in settings if label_of(other[0]) == label_of(setting[0])]
        options = setting[0].settings
        differing = [f"{name} {options.get(name)}" for name in _differing(alike)]
        labels.append(", ".join([label_of(setting[0]), *differing]))
    return labels


def by_teacher(runs: Iterable[Trained]) -> Mapping[str, list[Trained]]:
    """The runs of every teacher, in the order of their names."""
    found: dict[str, list[Trained]] = {}
    for run in runs:
        if run.teacher:
            found.setdefault(run.teacher, []).append(run)
    return dict(sorted(found.items()))
