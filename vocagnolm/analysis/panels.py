"""A figure as data, and its drawing: hollow marks where a number is the paper's."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vocagnolm.host.plots import SMALL, dashes, new_plot, save_plot, series_style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Mark:
    """One mark, and the line it is on.

    Attributes:
        x: a number, the name of a column, or None for a level that holds everywhere.
        y: mean over the seeds.
        bar: with several seeds a standard deviation to either side, with one the 95 % interval of
            its evaluation; None where neither is known.
        marked: as in `AccuracyScore`.
        seeds: number of runs; 0 if it is the paper's.
        label: of the line, in the legend; "" for none.
        style: number of the line's marker, shade and dashes.
        reported: printed in the paper; such marks are hollow.
    """

    x: float | str | None
    y: float
    bar: tuple[float, float] | None = None
    text: str = ""
    marked: tuple[str, ...] = ()
    seeds: int = 0
    runs: tuple[str, ...] = ()
    label: str = ""
    style: int = 0
    joined: bool = True
    reported: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `columns` are its places if x is a name."""

    x_label: str
    y_label: str
    marks: Sequence[Mark]
    columns: Sequence[str] = ()

    def lines(self) -> list[list[Mark]]:
        """Group the marks by line, in order."""
        lines: dict[object, list[Mark]] = {}
        for mark in self.marks:
            lines.setdefault((mark.label, mark.style, mark.joined), []).append(mark)
        return list(lines.values())


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
        singles = {mark.bar is not None for mark in marks if mark.seeds == 1}
        notes = []
        if many:
            counts = " or ".join(map(str, many))
            notes.append(f"means over {counts} seeds, bars: standard deviation")
        if True in singles:
            notes.append("bars of single runs: 95 % interval of the evaluation")
        if False in singles:
            notes.append("without a bar: one seed")
        if any(mark.reported for mark in marks):
            notes.append("hollow: as reported (arXiv 2503.19123v1)")
        if words:
            notes.append(f"*: {', '.join(words)}")
        return notes

    def content(self) -> dict[str, object]:
        """Return the content of `figure-N.json`: panels, and one row for each mark."""
        return {
            "figure": self.number,
            "title": self.title,
            "notes": self.notes(),
            "panels": [
                {"x_label": panel.x_label, "y_label": panel.y_label, "columns": panel.columns}
                for panel in self.panels
            ],
            "marks": [
                {"panel": number, **asdict(mark)}
                for number, panel in enumerate(self.panels)
                for mark in panel.marks
            ],
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
    tops: dict[object, Mark] = {}
    for mark in found:
        if mark.x not in tops or mark.y > tops[mark.x].y:
            tops[mark.x] = mark
    return [
        replace(mark, text=names[mark.x]) if mark.x in names and mark is tops[mark.x] else mark
        for mark in found
    ]


def draw_figure(figure: Figure, path: Path) -> None:
    """Draw a figure as PNG, and as PDF beside it."""
    import matplotlib

    widths = tuple(_inches(panel, alone=len(figure.panels) == 1) for panel in figure.panels)
    same_y = len({panel.y_label for panel in figure.panels}) == 1
    # Names of models and options are no formulas: a dollar sign is a dollar sign.
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9}):
        canvas, places = new_plot(sum(widths), 4.2, widths, share_y=same_y)
        handles: dict[str, Artist] = {}
        for axes, panel in zip(places, figure.panels, strict=True):
            _draw_panel(axes, panel)
            if same_y:
                axes.label_outer()
            handles |= {
                label: x for x, label in zip(*axes.get_legend_handles_labels(), strict=True)
            }
        canvas.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=min(len(handles), max(2, round(sum(widths) / 2.6))),
            frameon=False,
            fontsize=SMALL,
        )
        notes = textwrap.wrap("; ".join(figure.notes()), round(17 * sum(widths)))
        canvas.suptitle("\n".join([figure.title, *notes]), size=SMALL)
        save_plot(canvas, path, ".pdf")


def _inches(panel: Panel, *, alone: bool) -> float:
    """Return the width of a panel: marks side by side take more than those of a line."""
    a_column = 0.45 if any(mark.joined for mark in panel.marks) else 0.8
    return max(6.0 if alone else 4.6, 1.2 + a_column * len(panel.columns))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    lines, is_joined = panel.lines(), any(mark.joined for mark in panel.marks)
    for number, found in enumerate(lines):
        # Lines that only have marks stand side by side within each column.
        apart = panel.columns and not is_joined
        _draw_line(axes, panel, found, 0.6 * ((number + 0.5) / len(lines) - 0.5) if apart else 0.0)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.tick_params(labelsize=SMALL)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.columns:
        axes.set_xticks(range(len(panel.columns)), broken(panel.columns), fontsize=SMALL)
        axes.set_xlim(-0.6, len(panel.columns) - 0.4)
    for mark in panel.marks:
        if mark.text:
            _write_text(axes, panel, mark, is_above=is_joined)


def broken(names: Sequence[str]) -> list[str]:
    """Break long names of columns into lines."""
    return [name.replace("w/o ", "w/o\n").replace(", ", ",\n") for name in names]


def _draw_line(axes: Axes, panel: Panel, found: Sequence[Mark], offset: float) -> None:
    first, style = found[0], series_style(found[0].style)
    dash = dashes(first.style) if first.joined else "none"
    label = f"{first.label}*" if any(mark.marked for mark in found) else first.label or None
    # A level: a line across the axes, and a band for its bar.
    if first.x is None:
        for mark in found:
            axes.axhline(mark.y, color=style["color"], linestyle=dash, label=label, linewidth=1.2)
            if mark.bar:
                axes.axhspan(*mark.bar, color=style["color"], alpha=0.12, linewidth=0)
        return
    ends = [mark.bar or (mark.y, mark.y) for mark in found]
    axes.errorbar(
        [_place(panel, mark) + offset for mark in found],
        [mark.y for mark in found],
        # Distances below and above the marks.
        yerr=[
            [max(mark.y - low, 0.0) for mark, (low, _) in zip(found, ends, strict=True)],
            [max(high - mark.y, 0.0) for mark, (_, high) in zip(found, ends, strict=True)],
        ]
        if any(mark.bar for mark in found)
        else None,
        markerfacecolor="white" if first.reported else style["color"],
        linestyle=dash,
        label=label,
        capsize=2.5,
        elinewidth=0.9,
        linewidth=1.2,
        **style,
    )


def _place(panel: Panel, mark: Mark) -> float:
    if isinstance(mark.x, str):
        return float(panel.columns.index(mark.x))
    assert mark.x is not None
    return mark.x


def _write_text(axes: Axes, panel: Panel, mark: Mark, *, is_above: bool) -> None:
    """Write the text of a mark inside the axes: above all marks there, or beside its own."""
    low, high = axes.get_xlim()
    x = _place(panel, mark)
    side = (x - low) / (high - low)
    here = [other for other in panel.marks if other.x == mark.x]
    top = max(other.bar[1] if other.bar else other.y for other in here)
    # Near an end of the axes the text turns inwards.
    align = "center" if is_above else "left"
    if side < 0.25:
        align = "left"
    elif side > 0.75:
        align = "right"
    axes.annotate(
        mark.text,
        (x, top if is_above else mark.y),
        xytext=(0, 7) if is_above else (-7 if side > 0.75 else 7, -2.5),
        textcoords="offset points",
        ha=align,
        fontsize=7.5,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.5},
    )
