"""The style of all plots: series differ in colour, and in grey by marker and dashes."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS, DASHES = "os^DvPX", ("-", "--", ":", "-.")
# Neighbours differ in lightness too.
COLORS = "#1f5fbf #d2691e #1b7f4d #8e44ad #0e7490 #b5267b #7a5c00 #475569".split()
_DPI = 150


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

    figure = Figure(figsize=(width, height), layout="constrained")
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


def save_plot(figure: Figure, path: Path, *suffixes: str) -> None:
    """Write a figure at `path`, and beside it under further suffixes, as ".pdf"."""
    for suffix in (path.suffix, *suffixes):
        figure.savefig(path.with_suffix(suffix), dpi=_DPI)


def embed(figure: Figure) -> str:
    """Write a figure as the address of a picture that a page holds itself."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
