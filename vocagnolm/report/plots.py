"""The pictures of a comparison, and the style of all plots: readable in grey, too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from vocagnolm.report.comparison import Comparison
from vocagnolm.report.evaluations import Evaluation, heading, in_order
from vocagnolm.report.trainings import TrainingRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "os^DvPX"
_DASHES = ("-", "--", ":", "-.")
# Neighbouring colours also differ in lightness, so that they differ in a grey print.
COLORS = "#1f5fbf #d2691e #1b7f4d #8e44ad #0e7490 #b5267b #7a5c00 #475569".split()


# -- Style ---------------------------------------------------------------------------------------


def series_style(index: int) -> dict[str, Any]:
    """Return the marker, line and colour of a series. All repeat, but rarely together."""
    return {
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "color": COLORS[index % len(COLORS)],
    }


def new_plot(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Open a figure, in inches, with axes in rows. Options as for `Figure.subplots`."""
    # A bare Figure needs no display, and does not change a notebook's backend.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    plots = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes in plots:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure, plots


def add_legend(figure: Figure, handles: Mapping[str, Any]) -> None:
    """Add a legend below a figure, with as many columns as fit."""
    longest_label = max((len(label) for label in handles), default=1)
    # A letter is about 0.075 inches wide, and the key of an entry 0.6.
    columns = int(figure.get_figwidth() / (0.075 * longest_label + 0.6))
    # Names of models and options are not formulas.
    labels = [label.replace("$", r"\$") for label in handles]
    style: dict[str, Any] = {"loc": "outside lower left", "frameon": False, "fontsize": 8}
    figure.legend(list(handles.values()), labels, ncols=max(1, columns), **style)


# -- Accuracies ----------------------------------------------------------------------------------


def bar_series(comparison: Comparison) -> dict[str, pd.DataFrame]:
    """Return the bars of a plot of accuracies by label: value, low and high by column.

    The runs of a setting are one bar: the mean over seeds with its standard deviation. Other bars
    have the 95 % interval of their evaluation, and the paper's have none. Models that were asked or
    graded differently are never averaged.
    """
    setting_of = {}
    for setting, runs in comparison.settings.items():
        for run in runs:
            setting_of[run.label] = setting
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in comparison.evaluations:
        # An evaluation of a model that was not trained here is its own group.
        label = setting_of.get(evaluation.label, evaluation.label)
        # The first evaluation of a setting decides how its models are asked and graded.
        if label in groups and evaluation.settings != groups[label][0].settings:
            label += f", {evaluation.label}"
        groups.setdefault(label, []).append(evaluation)
    series = {}
    for label, group in groups.items():
        scores = pd.concat([pd.DataFrame(evaluation.scores) for evaluation in group])
        columns = scores.groupby("column", sort=False)
        bars = columns.agg({"value": "mean", "low": "first", "high": "first"})
        # Seeds differ by more than one evaluation's items make an accuracy uncertain.
        if len(group) > 1:
            deviation = columns.value.std()
            bars["low"], bars["high"] = bars.value - deviation, bars.value + deviation
        # A star marks numbers that may not be compared with the paper's.
        series[f"{label}*" if any(scores.marked) else label] = bars
    # The cells of one row of the paper are one series, without intervals.
    if comparison.reported:
        cells = pd.DataFrame(comparison.reported).rename(columns={"reported": "value"})
        for row, bars in cells.groupby("row", sort=False):
            series[f"reported: {row}"] = bars.set_index("column")[["value"]]
    return series


def draw_bars(series: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw accuracies with intervals by column. The paper's are hollow."""
    columns = in_order(pd.concat(list(series.values())).index)
    # The bars of a column take four fifths of its width, and a bar at most one fifth.
    width = min(0.8 / len(series), 0.2)
    inches = 1.2 + len(columns) * (0.7 + 0.12 * len(series))
    figure, (axes,) = new_plot(min(max(inches, 5.2), 16.0), 3.6 + 0.2 * len(series))
    handles = {}
    for index, (label, bars) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        # The series of a column are side by side, centred on its tick.
        offset = width * (index - (len(series) - 1) / 2)
        positions = [columns.index(column) + offset for column in bars.index]
        look: dict[str, Any] = {"facecolor": "white"}
        if "low" in bars:
            # Rounding may move an end of an interval past the value.
            distances = [(bars.value - bars.low).clip(0), (bars.high - bars.value).clip(0)]
            look = {"facecolor": color, "yerr": distances, "error_kw": {"elinewidth": 0.9}}
        handles[label] = axes.bar(positions, bars.value, 0.85 * width, edgecolor=color, **look)
    names = []
    for column in columns:
        names.append(heading(column).replace("w/o ", "w/o\n").replace(", ", ",\n"))
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="accuracy (%)", ylim=(0, None))
    add_legend(figure, handles)
    return figure


# -- Training ------------------------------------------------------------------------------------


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
                tokens = entry["step"] * run.options["global_batch_tokens"]
                rows.append(entry | {"run": run.label, "tokens": tokens})
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
            style = series_style(numbers[label])
            axes.fill_between(curve.tokens, curve.low, curve.high, color=style["color"], alpha=0.15)
            # A long curve has a marker at each tenth of the plot.
            (handles[label],) = axes.plot(curve.tokens, curve["mean"], markevery=0.1, **style)
        axes.set(xlabel="tokens with padding", ylabel=title)
    # The last row may have room for more plots than there are.
    for axes in plots[len(curves) :]:
        axes.remove()
    add_legend(figure, handles)
    return figure
