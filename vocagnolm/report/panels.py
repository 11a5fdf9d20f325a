"""A figure as data, and its drawing: hollow marks where a number is the paper's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING

from vocagnolm.report.plots import (
    INK,
    PAPER,
    SMALL,
    dashes,
    inline_svg,
    new_plot,
    plot_style,
    save_plot,
    series_style,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# The place beside the numbers of chunks.
TOKEN_LEVEL = "token level"
# Of a line; one of more is a curve, with a band for its bars.
_MOST_MARKERS = 20


@dataclass(frozen=True)
class Mark:
    """One mark, and the line it is on."""

    # A number, the name of a column, or None for a level that holds everywhere.
    x: float | str | None
    # Mean over the seeds.
    y: float
    # With several seeds a standard deviation to either side, with one the 95 % interval of its
    # evaluation; None where neither is known.
    bar: tuple[float, float] | None = None
    text: str = ""
    # As in the scores of a `Run`.
    marked: tuple[str, ...] = ()
    # Number of runs; 0 if it is the paper's.
    seeds: int = 0
    runs: tuple[str, ...] = ()
    # Of the line, in the legend; "" for none.
    label: str = ""
    # Number of the line's marker, colour and dashes.
    style: int = 0
    joined: bool = True
    # Printed in the paper; such marks are hollow.
    reported: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `columns` are its places if x is a name, where marks may be `bars`."""

    x_label: str
    y_label: str
    marks: Sequence[Mark]
    columns: Sequence[str] = ()
    bars: bool = False
    # Of the axis of bars; by default above the highest.
    top: float | None = None


@dataclass(frozen=True)
class Figure:
    """One figure of the paper, drawn from runs of ours."""

    number: int
    title: str
    panels: Sequence[Panel]

    def notes(self) -> list[str]:
        """List all that has to be known to read it."""
        marks = [mark for panel in self.panels for mark in panel.marks]
        many = sorted({mark.seeds for mark in marks if mark.seeds > 1})
        words = sorted({word for mark in marks for word in mark.marked})
        have_bars = {mark.bar is not None for mark in marks if mark.seeds == 1}
        notes = {
            f"means over {' or '.join(map(str, many))} seeds, bars: standard deviation": many,
            "bars of single runs: 95 % interval of the evaluation": True in have_bars,
            "without a bar: one seed": False in have_bars,
            "hollow: as reported (arXiv 2503.19123v1)": any(mark.reported for mark in marks),
            f"*: {', '.join(words)}": words,
        }
        return [note for note, applies in notes.items() if applies]

    def content(self) -> dict[str, object]:
        """Return the content of `figure-N.json`: panels, and one row for each mark."""
        panels = list(enumerate(self.panels))
        about = ("x_label", "y_label", "columns")
        return {
            "figure": self.number,
            "title": self.title,
            "notes": self.notes(),
            "panels": [{name: vars(panel)[name] for name in about} for _, panel in panels],
            "marks": [{"panel": n, **asdict(mark)} for n, panel in panels for mark in panel.marks],
        }


def line(
    found: Iterable[Mark], label: str, style: int, *, joined: bool = True, reported: bool = False
) -> list[Mark]:
    """Put marks on one line."""
    return [
        replace(mark, label=label, style=style, joined=joined, reported=reported) for mark in found
    ]


def name_once(found: Sequence[Mark], names: Mapping[object, str]) -> list[Mark]:
    """Write the name of a place beside the highest of its marks."""
    tops = [max((m for m in found if m.x == mark.x), key=lambda m: m.y) for mark in found]
    return [
        replace(mark, text=names[mark.x]) if mark.x in names and mark is top else mark
        for mark, top in zip(found, tops, strict=True)
    ]


def overlap_panels(audits: pd.DataFrame) -> list[Panel]:
    """Put IoU and IoS against the number of chunks; the rows of an audit have its `label`."""
    audits = audits.astype({"chunks": int}).sort_values("chunks", kind="stable")
    columns = [*map(str, sorted(set(audits.chunks) - {0})), TOKEN_LEVEL]
    panels = []
    for name, column in (("IoU", "iou"), ("IoS", "ios")):
        found: list[Mark] = []
        rows = audits[audits.column == column].groupby("label", sort=False)
        for style, (label, audit) in enumerate(rows):
            level, *curve = (
                Mark(str(x.chunks), x.value, None if isnan(x.low) else (x.low, x.high))
                for x in audit.itertuples()
            )
            found += line(curve, label, style)
            # The token level is no number of chunks: a mark of its own, on no line.
            level = replace(level, x=TOKEN_LEVEL)
            found += line([level], "" if curve else label, style, joined=False)
        panels.append(Panel("chunks of a sequence", f"{name} (% of characters)", found, columns))
    return panels


def draw_figure(figure: Figure, path: Path, *suffixes: str) -> None:
    """Draw a figure, and beside it under further suffixes, as ".pdf"."""
    widths = tuple(map(_width, figure.panels))
    same_y = len({panel.y_label for panel in figure.panels}) == 1
    with plot_style():
        canvas, places = new_plot(sum(widths), 4.2, widths, share_y=same_y)
        handles: dict[str, Artist] = {}
        for axes, panel in zip(places, figure.panels, strict=True):
            _draw_panel(axes, panel)
            if same_y:
                axes.label_outer()
            shown, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, shown, strict=True))
        canvas.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower left",
            # Inches of a letter and of a key.
            ncols=max(1, int(sum(widths) / (0.075 * max(map(len, handles), default=1) + 0.6))),
            frameon=False,
            fontsize=SMALL,
        )
        words = (figure.title, *figure.notes())
        lines = [part for each in words for part in textwrap.wrap(each, round(13 * sum(widths)))]
        canvas.suptitle("\n".join(lines), x=0.01, ha="left", size=SMALL)
        save_plot(canvas, path, *suffixes)


def draw_svg(panel: Panel) -> str:
    """Draw a panel for a page that has the legend beside it."""
    with plot_style():
        canvas, (axes,) = new_plot(4.6, 2.9)
        _draw_panel(axes, panel)
        return inline_svg(canvas)


def _width(panel: Panel) -> float:
    """Return inches: names take room along the axis, and so do bars beside each other."""
    lines = len({mark.label for mark in panel.marks})
    each = max(0.8, 0.25 + 0.12 * lines) if panel.bars else 0.45
    return min(max(5.2, 1.2 + each * len(panel.columns)), 16.0)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    lines: dict[object, list[Mark]] = {}
    for mark in panel.marks:
        lines.setdefault((mark.label, mark.style, mark.joined), []).append(mark)
    places = {column: float(place) for place, column in enumerate(panel.columns)}
    for number, found in enumerate(lines.values()):
        if panel.bars:
            _draw_bars(axes, places, found, number, len(lines))
        else:
            _draw_line(axes, places, found)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.tick_params(labelsize=SMALL)
    axes.margins(0.12 if any(mark.text for mark in panel.marks) else 0.05, 0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.columns:
        broken = [name.replace("w/o ", "w/o\n").replace(", ", ",\n") for name in panel.columns]
        axes.set_xticks(range(len(broken)), broken)
        axes.set_xlim(-0.6, len(broken) - 0.4)
    if panel.bars:
        axes.set_ylim(0, panel.top and 1.05 * panel.top)


def _distances(found: Sequence[Mark]) -> list[tuple[float, ...]] | None:
    """Return the distances below and above the marks; a missing bar has none."""
    if not any(mark.bar for mark in found):
        return None
    bars = [mark.bar or (mark.y, mark.y) for mark in found]
    ends = ((max(m.y - a, 0), max(b - m.y, 0)) for m, (a, b) in zip(found, bars, strict=True))
    return list(zip(*ends, strict=True))


def _label(found: Sequence[Mark]) -> str | None:
    first = found[0]
    return f"{first.label}*" if any(mark.marked for mark in found) else first.label or None


def _draw_bars(
    axes: Axes, places: Mapping[str, float], found: Sequence[Mark], number: int, count: int
) -> None:
    """Draw one of `count` bars of every column."""
    first, color = found[0], series_style(found[0].style)["color"]
    # Not wider than a fifth of a column, however few there are.
    width = min(0.8 / count, 0.2)
    offset = width * (number - (count - 1) / 2)
    axes.bar(
        [places[str(mark.x)] + offset for mark in found],
        [mark.y for mark in found],
        0.85 * width,
        yerr=_distances(found),
        facecolor=PAPER if first.reported else color,
        edgecolor=color,
        error_kw={"ecolor": INK, "capsize": 1.5, "elinewidth": 0.9},
        label=_label(found),
    )


def _draw_line(axes: Axes, places: Mapping[str, float], found: Sequence[Mark]) -> None:
    first, look = found[0], series_style(found[0].style)
    dash, color = dashes(first.style) if first.joined else "none", look["color"]
    # A level: a line across the axes, and a band for its bar.
    if first.x is None:
        for mark in found:
            axes.axhline(mark.y, color=color, linestyle=dash, label=_label(found), linewidth=1.2)
            if mark.bar:
                axes.axhspan(*mark.bar, color=color, alpha=0.12, linewidth=0)
        return
    xs = [places[mark.x] if isinstance(mark.x, str) else mark.x or 0.0 for mark in found]
    ys = [mark.y for mark in found]
    if len(found) > _MOST_MARKERS:
        axes.plot(xs, ys, color=color, linestyle=dash, label=_label(found), linewidth=1.4)
        if any(mark.bar for mark in found):
            low, high = zip(*(mark.bar or (mark.y, mark.y) for mark in found), strict=True)
            axes.fill_between(xs, low, high, color=color, alpha=0.15, linewidth=0)
        return
    axes.errorbar(
        xs,
        ys,
        yerr=_distances(found),
        markerfacecolor=PAPER if first.reported else color,
        linestyle=dash,
        label=_label(found),
        capsize=2.5,
        linewidth=1.2,
        **look,
    )
    for x, mark in zip(xs, found, strict=True):
        # Slanted, so that names of neighbours do not lie on each other.
        look = {"fontsize": 7.5, "rotation": 32, "rotation_mode": "anchor"}
        axes.annotate(mark.text, (x, mark.y), (4, 4), textcoords="offset points", **look)
