"""The style of all plots: readable in grey, series told apart by marker, shade and dashes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS, SHADES, DASHES = "os^DvPX", ("black", "0.35", "0.6"), ("-", "--", ":", "-.")
# Points: legends, ticks and notes.
SMALL = 8


def series_style(number: int) -> dict[str, Any]:
    """Return the marker and the shade of a series; both repeat, but not together soon."""
    return {"marker": MARKERS[number % len(MARKERS)], "color": SHADES[number % len(SHADES)]}


def dashes(number: int) -> str:
    """Return the line style of a series."""
    return DASHES[number % len(DASHES)]


def new_plot(
    width: float, height: float, widths: tuple[float, ...] = (1.0,), *, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Open a figure, in inches, with axes side by side of the given relative widths."""
    # A bare Figure needs no screen, and leaves the backend of a notebook as it is.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(widths), width_ratios=widths, sharey=share_y, squeeze=False)
    return figure, list(axes[0])


def save_plot(figure: Figure, path: Path, *suffixes: str) -> None:
    """Write a figure at `path`, and beside it under further suffixes, as ".pdf"."""
    for suffix in (path.suffix, *suffixes):
        figure.savefig(path.with_suffix(suffix), dpi=150)
