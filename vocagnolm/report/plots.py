"""The plots of comparisons, and the style of all: in grey, series differ by marker and dashes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vocagnolm.report.runs import Row, Run, TrainingRun

MARKERS, DASHES = "os^DvPX", ("-", "--", ":", "-.")
# Neighbours differ in lightness too.
COLORS = "#1f5fbf #d2691e #1b7f4d #8e44ad #0e7490 #b5267b #7a5c00 #475569".split()
# Of a curve; a longer one is a line alone.
_MOST_MARKERS = 20
# Titles, and entries of the log: the value, and the ends of its band, if it has some.
CURVES = {
    "held-out loss (nats)": ["eval_loss"],
    "loss on all tokens (nats)": ["student_loss_nats"],
    "excess, median (nats)": [f"excess_loss_p{share}_nats" for share in (50, 10, 90)],
    "mean weight of the tokens": ["mean_weight"],
}


def series_style(index: int) -> dict[str, Any]:
    """Return the marker and the colour of a series; both repeat, but not together soon."""
    return {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)]}


def dashes(index: int) -> str:
    """Return the line style of a series."""
    return DASHES[index % len(DASHES)]


def new_plot(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Open a figure, in inches, with axes in rows; options as of `Figure.subplots`."""
    # A bare Figure needs no screen, and leaves the backend of a notebook as it is.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in places:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, places


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Put a legend below a figure, as many entries beside each other as have room."""
    longest = max(map(len, handles), default=1)
    # Inches of a letter and of a key.
    columns = int(figure.get_figwidth() / (0.075 * longest + 0.6))
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower left",
        ncols=max(1, columns),
        frameon=False,
        fontsize=8,
    )
    for text in legend.get_texts():
        # Names of models and options are no formulas: a dollar sign is a dollar sign.
        text.set_parse_math(False)


def embed(figure: Figure) -> str:
    """Write a figure as the address of a picture that a page holds itself."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def bar_series(
    runs: Sequence[Run], settings: Mapping[str, Sequence[TrainingRun]], reported: Sequence[Row]
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
    for row in reported:
        # Hollow, and without an interval.
        value = dict.fromkeys(("value", "low", "high"), row["reported"])
        bar = pd.DataFrame(value | {"marked": False}, index=[row["column"]])
        label = f"reported: {row['row']}"
        series[label] = pd.concat([series[label], bar]) if label in series else bar
    return series


def _bars(group: Sequence[Run]) -> pd.DataFrame:
    """Average the columns that all runs have."""
    columns = pd.concat([pd.DataFrame(run.scores) for run in group]).groupby("column", sort=False)
    bars = columns.agg({"value": "mean", "low": "first", "high": "first", "marked": any})
    if len(group) > 1:
        deviation = columns.value.std()
        bars["low"], bars["high"] = bars.value - deviation, bars.value + deviation
    return bars[columns.size() == len(group)]


def draw_bars(
    series: Mapping[str, pd.DataFrame], headings: Mapping[str, str], title: str
) -> Figure:
    """Draw accuracies with their intervals by column; those of the paper are hollow."""
    columns = list(headings)
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
    names = [x.replace("w/o ", "w/o\n").replace(", ", ",\n") for x in headings.values()]
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="accuracy (%)", xlim=(-0.6, len(names) - 0.4))
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=8, parse_math=False)
    add_legend(figure, handles)
    return figure


def read_curves(
    settings: Mapping[str, Sequence[TrainingRun]],
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return losses and shares along the training by title and setting.

    Each is averaged over the seeds of the setting: columns tokens, mean, low and high.
    """
    curves: dict[str, dict[str, pd.DataFrame]] = {title: {} for title in CURVES}
    for label, runs in settings.items():
        rows = []
        for run in runs:
            for entry in run.state.get("log_history", ()):
                tokens = entry["step"] * run.batch_tokens
                rows.append({**entry, "run": run.label, "tokens": tokens})
        whole = pd.DataFrame(rows)
        for title, (main, *ends) in CURVES.items():
            if main not in whole.columns:
                continue
            log = whole.dropna(subset=[main])
            places = log.groupby("tokens")
            points = places[main].agg(mean="mean", low="min", high="max", runs="count")
            if ends:
                points[["low", "high"]] = places[ends].mean()
            # Where all of the runs are.
            points = points[points.runs >= log.run.nunique()].reset_index()
            curves[title][label] = points[["tokens", "mean", "low", "high"]]
    return {title: found for title, found in curves.items() if found}


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
