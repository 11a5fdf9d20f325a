"""The paper's figures, drawn: readable in grey, hollow where a number is the paper's.

    vocagnolm compare runs/a runs/b audits/t --figure 6 --output_dir figures

Every figure is written as PNG, as PDF and, with all that it shows, as JSON.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vocagnolm.analysis.figure_data import Sources, read_sources, save
from vocagnolm.analysis.figure_panels import Figure, Line, Panel, Point
from vocagnolm.analysis.figure_plans import PLANS, plan
from vocagnolm.views.figure import GUIDANCE_FIGURE, draw_guidance, plan_guidance

NUMBERS = (*PLANS, GUIDANCE_FIGURE)
# Told apart without colour: by marker, shade and dashes.
MARKERS, SHADES, DASHES = "os^DvPX", ("black", "0.35", "0.6"), ("-", "--", ":", "-.")


def make(
    numbers: Sequence[int],
    paths: Sequence[Path],
    directory: Path,
    metric: str | None = None,
    reported: Sequence[str] = (),
) -> list[Path]:
    """Draw figures of the paper from runs of ours.

    Args:
        numbers: of the figures, each of `NUMBERS`.
        paths: directories of runs, evaluations, audits and inspections.
        directory: gets figure-N.png, figure-N.pdf and figure-N.json.
        metric: quality of a model: a column of the evaluation or "eval_loss"; None: the paper's.
        reported: names of rows of the paper.

    Returns:
        The images.

    Raises:
        ValueError: what a figure needs is missing, or an option does not apply to it.
    """
    sources = read_sources(paths)
    made = []
    for number in dict.fromkeys(numbers):
        path = directory / f"figure-{number}.png"
        _make(number, sources, path, metric, reported)
        made.append(path)
    return made


def _make(
    number: int, sources: Sources, path: Path, metric: str | None, reported: Sequence[str]
) -> None:
    if number == GUIDANCE_FIGURE:
        views = plan_guidance(sources, metric, reported)
        save(
            {"figure": number, "views": [asdict(view) for view in views]}, path.with_suffix(".json")
        )
        draw_guidance(views, path)
        return
    figure = plan(number, sources, metric, reported)
    content = {"figure": number, **asdict(figure), "notes": figure.notes()}
    save(content, path.with_suffix(".json"))
    draw(figure, path)


def draw(figure: Figure, path: Path) -> None:
    """Draw a figure as PNG, and as PDF beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [_width(panel, alone=len(figure.panels) == 1) for panel in figure.panels]
    same_y = len({panel.y_label for panel in figure.panels}) == 1
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        canvas, axes = pyplot.subplots(
            1,
            len(widths),
            figsize=(sum(widths), 4.2),
            width_ratios=widths,
            sharey=same_y,
            squeeze=False,
            layout="constrained",
        )
        for place, panel in zip(axes[0], figure.panels, strict=True):
            _draw_panel(place, panel)
            if same_y:
                place.label_outer()
        handles = {label: x for place in axes[0] for x, label in zip(*_legend(place), strict=True)}
        canvas.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), max(2, round(sum(widths) / 2.6))),
            frameon=False,
            fontsize=8,
        )
        notes = textwrap.wrap("; ".join(figure.notes()), round(17 * sum(widths)))
        canvas.suptitle("\n".join([figure.title, *notes]), size=8)
        for suffix in (".png", ".pdf"):
            canvas.savefig(path.with_suffix(suffix), dpi=150)
        pyplot.close(canvas)


def _width(panel: Panel, *, alone: bool) -> float:
    """Inches that a panel needs: marks side by side take more than those of a line."""
    joined = any(line.joined for line in panel.lines)
    return max(6.0 if alone else 4.6, 1.2 + (0.45 if joined else 0.8) * len(panel.columns))


def _legend(axes: Any) -> Any:
    return axes.get_legend_handles_labels()


def _draw_panel(axes: Any, panel: Panel) -> None:
    spread = len(panel.lines) if panel.columns and not any(x.joined for x in panel.lines) else 1
    for number, line in enumerate(panel.lines):
        offset = 0.6 * ((number + 0.5) / spread - 0.5) if spread > 1 else 0.0
        _draw_line(axes, panel, line, offset)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.tick_params(labelsize=8)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.columns:
        names = [name.replace("w/o ", "w/o\n").replace(", ", ",\n") for name in panel.columns]
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_xlim(-0.6, len(names) - 0.4)
    _name_points(axes, panel)


def _draw_line(axes: Any, panel: Panel, line: Line, offset: float) -> None:
    style = {
        "color": SHADES[line.style % len(SHADES)],
        "linestyle": DASHES[line.style % len(DASHES)] if line.joined else "none",
        "label": line.label + "*" * any(point.marked for point in line.points) or None,
        "linewidth": 1.2,
    }
    if any(point.x is None for point in line.points):
        for point in line.points:
            axes.axhline(point.y, **style)
            if point.bar:
                axes.axhspan(*point.bar, color=style["color"], alpha=0.12, linewidth=0)
        return
    axes.errorbar(
        [_place(panel, point) + offset for point in line.points],
        [point.y for point in line.points],
        yerr=_bars(line.points),
        marker=MARKERS[line.style % len(MARKERS)],
        markerfacecolor="white" if line.reported else style["color"],
        capsize=2.5,
        elinewidth=0.9,
        **style,
    )


def _place(panel: Panel, point: Point) -> float:
    if isinstance(point.x, str):
        return float(panel.columns.index(point.x))
    assert point.x is not None
    return point.x


def _bars(points: Sequence[Point]) -> list[list[float]] | None:
    if not any(point.bar for point in points):
        return None
    ends = [point.bar or (point.y, point.y) for point in points]
    sides = zip(ends, points, strict=True)
    low, high = zip(*((max(p.y - a, 0.0), max(b - p.y, 0.0)) for (a, b), p in sides), strict=True)
    return [list(low), list(high)]


def _name_points(axes: Any, panel: Panel) -> None:
    """Write the texts inside the axes: above their marks, or beside them if there are no lines."""
    low, high = axes.get_xlim()
    points = [point for line in panel.lines for point in line.points]
    is_above = any(line.joined for line in panel.lines)
    for named in (point for point in points if point.text):
        x = _place(panel, named)
        side = (x - low) / (high - low)
        here = [point for point in points if point.x == named.x]
        top = max(point.bar[1] if point.bar else point.y for point in here)
        middle = "center" if is_above else "left"
        sign = -1 if side > 0.75 else 1
        axes.annotate(
            named.text,
            (x, top if is_above else named.y),
            xytext=(0, 7) if is_above else (7 * sign, -2.5),
            textcoords="offset points",
            ha="left" if side < 0.25 else "right" if side > 0.75 else middle,
            fontsize=7.5,
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5},
        )
