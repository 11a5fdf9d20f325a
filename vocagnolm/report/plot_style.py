"""The style of all plots: readable in grey, too."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "os^DvPX"
DASHES = ("-", "--", ":", "-.")
# Neighbouring colours also differ in lightness, so that they differ in a grey print.
COLORS = "#1f5fbf #d2691e #1b7f4d #8e44ad #0e7490 #b5267b #7a5c00 #475569".split()


def series_style(index: int) -> dict[str, Any]:
    """Return the marker and colour of a series. Both repeat, but rarely together."""
    return {"marker": MARKERS[index % len(MARKERS)], "color": COLORS[index % len(COLORS)]}


def dashes(index: int) -> str:
    """Return the line style of a series."""
    return DASHES[index % len(DASHES)]


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
    legend = figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower left",
        ncols=max(1, columns),
        frameon=False,
        fontsize=8,
    )
    for text in legend.get_texts():
        # Names of models and options are not formulas, so escape dollar signs.
        text.set_parse_math(False)


def embed(figure: Figure) -> str:
    """Return a figure as a data URL, which a page can contain."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
