"""The pictures of a comparison: accuracies as bars, and logs as curves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from vocagnolm.report.comparison import Comparison
from vocagnolm.report.evaluations import Evaluation, are_alike, heading, in_order
from vocagnolm.report.plot_style import add_legend, dashes, new_plot, series_style
from vocagnolm.report.trainings import TrainingRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A curve with more points is drawn without markers.
_MOST_MARKERS = 20


def bar_series(comparison: Comparison) -> dict[str, pd.DataFrame]:
    """Return the bars of a plot of accuracies by label: value, low, high, marked by column.

    The runs of a setting are one bar: the mean over seeds with its standard deviation. Other bars
    have the 95 % interval of their evaluation, and the paper's have none. Models that were asked or
    graded differently are never averaged.
    """
    setting_of = comparison.setting_of()
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in comparison.evaluations:
        # An evaluation of a model that was not trained here is its own group.
        label = setting_of.get(evaluation.label, evaluation.label)
        groups.setdefault(label, []).append(evaluation)
    series = {}
    for label, group in groups.items():
        if all(are_alike(*pair) for pair in itertools.combinations(group, 2)):
            series[label] = _bars(group)
        else:
            for evaluation in group:
                series[f"{label}, {evaluation.label}"] = _bars([evaluation])
    # The cells of one row of the paper are one series.
    for cell in comparison.reported:
        # The paper gives no interval, so both ends equal the value.
        value = cell["reported"]
        numbers = {"value": value, "low": value, "high": value, "marked": False}
        bar = pd.DataFrame(numbers, index=[cell["column"]])
        label = f"reported: {cell['row']}"
        series[label] = pd.concat([series[label], bar]) if label in series else bar
    return series


def _bars(group: Sequence[Evaluation]) -> pd.DataFrame:
    """Average the columns of evaluations that all have the same ones."""
    scores = pd.concat([pd.DataFrame(evaluation.scores) for evaluation in group])
    columns = scores.groupby("column", sort=False)
    bars = columns.agg({"value": "mean", "low": "first", "high": "first", "marked": any})
    # Seeds differ by more than one evaluation's items make an accuracy uncertain.
    if len(group) > 1:
        deviation = columns.value.std()
        bars["low"], bars["high"] = bars.value - deviation, bars.value + deviation
    return bars


def draw_bars(series: Mapping[str, pd.DataFrame], title: str) -> Figure:
    """Draw accuracies with intervals by column. The paper's are hollow."""
    drawn_columns: list[str] = []
    for bars in series.values():
        drawn_columns += list(bars.index)
    columns = in_order(drawn_columns)
    # The bars of a column take four fifths of its width, and a bar at most one fifth.
    width = min(0.8 / max(len(series), 1), 0.2)
    inches_per_column = max(0.8, 0.25 + 0.12 * len(series))
    inches = max(5.2, 1.2 + len(columns) * inches_per_column)
    figure, (axes,) = new_plot(min(inches, 16.0), 3.6 + 0.2 * len(series))
    handles = {}
    for index, (label, bars) in enumerate(series.items()):
        color = series_style(index)["color"]
        is_reported = label.startswith("reported: ")
        # The series of a column are side by side, centred on its tick.
        offset = width * (index - (len(series) - 1) / 2)
        # Rounding may move an end of an interval past the value.
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
    names = []
    for column in columns:
        names.append(heading(column).replace("w/o ", "w/o\n").replace(", ", ",\n"))
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="accuracy (%)", xlim=(-0.6, len(names) - 0.4))
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=8, parse_math=False)
    add_legend(figure, handles)
    return figure


def read_curves(
    settings: Mapping[str, Sequence[TrainingRun]],
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return losses and shares during training, by title and setting.

    Each is averaged over the seeds of the setting. Columns: tokens, mean, low and high.
    """
    # {title: entry of the log}
    entries = {
        "held-out loss (nats)": "eval_loss",
        "loss on all tokens (nats)": "student_loss_nats",
        "tokens where the teacher is ahead": "teacher_ahead_fraction",
        "mean weight of the tokens": "mean_weight",
    }
    curves: dict[str, dict[str, pd.DataFrame]] = {}
    for label, runs in settings.items():
        rows = []
        for run in runs:
            for entry in run.state.get("log_history", ()):
                tokens = entry["step"] * run.batch_tokens
                rows.append({**entry, "run": run.label, "tokens": tokens})
        logs = pd.DataFrame(rows)
        for title, name in entries.items():
            if name not in logs.columns:
                continue
            log = logs.dropna(subset=[name])
            by_tokens = log.groupby("tokens")
            # Runs of a setting log at the same steps, so their entries match by tokens.
            points = by_tokens[name].agg(mean="mean", low="min", high="max", runs="count")
            # Where a run ends, a mean over fewer runs would jump.
            points = points[points.runs >= log.run.nunique()].reset_index()
            curve = points[["tokens", "mean", "low", "high"]]
            curves.setdefault(title, {})[label] = curve
    # The plots are in this order, whatever was logged first.
    return {title: curves[title] for title in entries if title in curves}


def draw_curves(curves: Mapping[str, Mapping[str, pd.DataFrame]]) -> Figure:
    """Draw a plot for each title, with every setting's mean and band."""
    # A setting has the same style in all plots. The dictionary keeps the order, with each once.
    numbers: dict[str, int] = {}
    for by_setting in curves.values():
        for label in by_setting:
            numbers.setdefault(label, len(numbers))
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / 3)
    figure, plots = new_plot(4.3 * columns, 3.2 * rows + 0.25 * len(numbers), rows, columns)
    handles = {}
    for axes, (title, by_setting) in zip(plots, curves.items(), strict=False):
        for label, curve in by_setting.items():
            index = numbers[label]
            style = series_style(index)
            band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(curve.tokens, curve.low, curve.high, **band)
            if len(curve) > _MOST_MARKERS:
                style["marker"] = ""
            (line,) = axes.plot(curve.tokens, curve["mean"], linestyle=dashes(index), **style)
            handles[label] = line
        axes.set(xlabel="student tokens", ylabel=title)
    # The last row may have room for more plots than there are.
    for axes in plots[len(curves) :]:
        axes.remove()
    add_legend(figure, handles)
    return figure
