"""The style of all plots: series told apart by colour, and in grey by marker, dashes and place."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS, DASHES = "os^DvPX", ("-", "--", ":", "-.")
# Neighbours differ in lightness too. `assets/page.css` has each as --series-N, for light and dark.
COLORS = "#1f5fbf #d2691e #1b7f4d #8e44ad #0e7490 #b5267b #7a5c00 #475569".split()
INK, PAPER = "#1c1b19", "#ffffff"
# Points: legends, ticks and notes.
SMALL = 8
_STYLE = {
    # Names of models and options are no formulas: a dollar sign is a dollar sign.
    **{"text.parse_math": False, "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "v"},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
}


def series_style(number: int) -> dict[str, Any]:
    """Return the marker and the colour of a series; both repeat, but not together soon."""
    return {"marker": MARKERS[number % len(MARKERS)], "color": COLORS[number % len(COLORS)]}


def dashes(number: int) -> str:
    """Return the line style of a series."""
    return DASHES[number % len(DASHES)]


def plot_style() -> AbstractContextManager[None]:
    """Draw in the style of all figures for as long as the block lasts."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)  # type: ignore[arg-type]


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


def inline_svg(figure: Figure) -> str:
    """Write a figure as an element of a page, whose colours are those of `assets/page.css`."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    # Of no use on a page, or twice on it.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    for number, color in enumerate(COLORS):
        svg = svg.replace(color, f"var(--series-{number})")
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--card)")
