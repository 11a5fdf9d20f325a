"""Pages for a browser, each one file that loads nothing, and the pictures of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jinja2
import pandas as pd

from vocagnolm.report.plots import add_legend, dashes, new_plot, series_style
from vocagnolm.report.runs import Run, TrainingRun, heading, in_order

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("vocagnolm", "assets"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
# Of a curve; a longer one is a line alone.
_MOST_MARKERS = 20


def render_page(template: str, **values: object) -> str:
    """Fill a template of `assets`; every text is escaped."""
    return _TEMPLATES.get_template(template).render(**values)


def bar_series(
    runs: Sequence[Run], settings: Mapping[str, Sequence[TrainingRun]], reported: pd.DataFrame
) -> dict[str, pd.DataFrame]:
    """Return the bars of a picture of accuracies by label: value, low, high, marked by column.

    The runs of a setting are one bar, the mean over its seeds with its standard deviation; others
    have the 95 % interval of their evaluation, and rows of the paper have none. Runs that were
    asked or graded differently are never averaged.
    """
    # A chat has no training run.
    setting_of = {run.label: label for label, setting in settings.items() for run in setting}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(setting_of.get(run.label, run.label), []).append(run)
    series = {}
    for label, group in groups.items():
        if all(run.conditions == group[0].conditions for run in group):
            series[label] = _bars(group)
        else:
            series |= {f"{label}, {run.label}": _bars([run]) for run in group}
    for row, lines in reported.groupby("row", sort=False):
        bars = pd.DataFrame({"value": lines.reported.to_numpy()}, lines.column)
        series[f"reported: {row}"] = bars.assign(low=bars.value, high=bars.value, marked=False)
    return series


def _bars(group: Sequence[Run]) -> pd.DataFrame:
    """Average the columns that all runs have."""
    columns = pd.concat([pd.DataFrame(run.scores) for run in group]).groupby("column", sort=False)
    bars = columns.agg({"value": "mean", "low": "first", "high": "first", "marked": any})
    if len(group) > 1:
        deviation = columns.value.std()
        bars["low"], bars["high"] = bars.value - deviation, bars.value + deviation
    return bars[columns.size() == len(group)]


def draw_bars(series: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Draw accuracies with their intervals; those of the paper are hollow."""
    columns = in_order(column for bars in series.values() for column in bars.index)
    # Not wider than a fifth of a column, however few there are.
    width = min(0.8 / max(len(series), 1), 0.2)
    inches = max(5.2, 1.2 + len(columns) * max(0.8, 0.25 + 0.12 * len(series)))
    figure, (axes,) = new_plot(min(inches, 16.0), 3.6 + 0.2 * len(series))
    handles = {}
    for index, (label, bars) in enumerate(series.items()):
        color = series_style(index)["color"]
        is_reported = label.startswith("reported: ")
        offset = width * (index - (len(series) - 1) / 2)
        distances = [(bars.value - bars.low).clip(0), (bars.high - bars.value).clip(0)]
        handles[f"{label}*" if bars.marked.any() else label] = axes.bar(
            [columns.index(column) + offset for column in bars.index],
            bars.value,
            0.85 * width,
            yerr=None if is_reported else distances,
            facecolor="white" if is_reported else color,
            edgecolor=color,
            error_kw={"capsize": 1.5, "elinewidth": 0.9},
        )
    names = [heading(column).replace("w/o ", "w/o\n").replace(", ", ",\n") for column in columns]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="accuracy (%)", xlim=(-0.6, len(names) - 0.4))
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=8, parse_math=False)
    add_legend(figure, handles)
    return figure


def draw_curves(curves: Mapping[str, Mapping[str, pd.DataFrame]]) -> Figure:
    """Draw a plot for each title: every setting's mean, with a band."""
    labels = list(dict.fromkeys(label for each in curves.values() for label in each))
    rows, columns = -(-len(curves) // 3), min(3, len(curves))
    figure, places = new_plot(4.3 * columns, 3.2 * rows + 0.25 * len(labels), rows, columns)
    handles = {}
    for axes, (title, each) in zip(places, curves.items(), strict=False):
        for label, curve in each.items():
            index = labels.index(label)
            look, tokens = series_style(index), curve.tokens
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(tokens, curve.low, curve.high, **band)
            if len(curve) > _MOST_MARKERS:
                look["marker"] = ""
            (handles[label],) = axes.plot(tokens, curve["mean"], linestyle=dashes(index), **look)
        axes.set(xlabel="student tokens", ylabel=title)
    for axes in places[len(curves) :]:
        axes.remove()
    add_legend(figure, handles)
    return figure
