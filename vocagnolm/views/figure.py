"""Figure 8: a text with its tokens kept, dropped and unmapped, and the teacher's pieces below."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.analysis.figure_data import Sources, guidance_views

if TYPE_CHECKING:
    from vocagnolm.views.view import TokenView

GUIDANCE_FIGURE = 8
WIDTH, MAX_LINES = 92, 14  # cells of a line, lines of a view
CELL_INCHES, LINE_INCHES, FONT_POINTS = 0.0695, 0.36, 8.0
FONT = "DejaVu Sans Mono"
_SHOWN = {"\n": "\u21b5", "\t": "\u2192", " ": "\u00b7"}
_NO_SIGN = "\u25a1"
_SAME_PIECE = "\u2033"  # of a token that shares the piece of the one before it
_STYLES: dict[str, dict[str, Any]] = {  # of the box and of the text in it
    "kept": {"box": {"facecolor": "0.2", "edgecolor": "0.2"}, "text": {"color": "white"}},
    "dropped": {"box": {"facecolor": "0.93", "edgecolor": "none"}, "text": {"color": "0.45"}},
    "unmapped, trained": {
        "box": {"facecolor": "white", "edgecolor": "black"},
        "text": {"color": "black"},
    },
    "unmapped, not trained": {
        "box": {"facecolor": "white", "edgecolor": "0.45", "linestyle": ":"},
        "text": {"color": "0.45"},
    },
    "nothing to learn": {
        "box": {"facecolor": "white", "edgecolor": "none"},
        "text": {"color": "0.45"},
    },
}


@dataclass(frozen=True)
class Cell:
    """A student token in the figure.

    Attributes:
        text: as shown: with signs for blanks and line ends.
        state: one of "kept", "dropped", "unmapped, trained", "unmapped, not trained" and
            "nothing to learn".
        pieces: the teacher's, as shown.
        line: where it stands.
        column: in that line, in widths of a letter.
        width: likewise.
    """

    text: str
    state: str
    pieces: str
    line: int
    column: int
    width: int


@dataclass(frozen=True)
class ShownText:
    """The beginning of a text.

    Attributes:
        source: where its views were read.
        student: its name.
        teacher: its name.
        top_k: share of the competing tokens that is kept.
        cells: the tokens that found room.
        left_out: how many did not.
    """

    source: str
    student: str
    teacher: str
    top_k: float
    cells: Sequence[Cell]
    left_out: int


def plan_guidance(
    sources: Sources, metric: str | None = None, reported: Sequence[str] = ()
) -> list[ShownText]:
    """Say what the figure shows: the first text of every source that has views.

    Raises:
        ValueError: there are none, or an option does not apply.
    """
    if metric or reported:
        option = "--metric" if metric else "--reported"
        raise ValueError(
            f"expected {option} for a figure of numbers, found --figure 8: leave it out"
        )
    if not sources.guidance:
        raise ValueError(
            "expected guidance.json or guidance/step-*.json for --figure 8, found none: make one "
            "with vocagnolm inspect --output_dir D, or train.py --guidance_table_steps 100"
        )
    shown = []
    for source, path in sources.guidance.items():
        view = guidance_views(path)
        tokens = view.texts[0].tokens if view.texts else ()
        cells = list(_cells(tokens))
        settings = view.settings
        left_out = len(tokens) - len(cells)
        shown.append(
            ShownText(source, settings.student, settings.teacher, settings.top_k, cells, left_out)
        )
    return shown


def _cells(tokens: Sequence[TokenView]) -> Iterator[Cell]:
    line = column = 0
    before: TokenView | None = None
    for token in tokens:
        text, pieces = _visible(token.text), _pieces(token, before)
        width = max(_width(text), _width(pieces))
        if column and (column + width > WIDTH or _begins_line(token.text, before)):
            line, column = line + 1, 0
        if line == MAX_LINES:
            return
        yield Cell(text, _state(token), pieces, line, column, width)
        column += width + 1
        before = token


def _begins_line(text: str, before: TokenView | None) -> bool:
    """Whether a token stands behind a line end, which may be its own first character."""
    is_behind = text.startswith("\n") or (before is not None and before.text.endswith("\n"))
    return is_behind and bool(text.strip("\n"))


def _state(token: TokenView) -> str:
    if token.status == "unmapped":
        return "unmapped, trained" if token.is_trained else "unmapped, not trained"
    return "nothing to learn" if token.status == "unlabelled" else token.status


def _pieces(token: TokenView, before: TokenView | None) -> str:
    shared = before is not None and before.pieces[-1:] == token.pieces[:1]
    texts = [_visible(piece.text) for piece in token.pieces]
    return "|".join([_SAME_PIECE, *texts[1:]] if shared and texts else texts)


def _visible(text: str) -> str:
    """A text with signs for blanks, line ends and what cannot be shown."""
    signs = (_SHOWN.get(letter, letter) for letter in text)
    return "".join(x if x.isprintable() else _NO_SIGN for x in signs)


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def draw_guidance(views: Sequence[ShownText], path: Path) -> None:
    """Draw the texts one below the other, as PNG and as PDF beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    starts, lines = [], 1.0
    for view in views:
        starts.append(lines)
        lines += 2.0 + max((cell.line for cell in view.cells), default=0)
    size = ((WIDTH + 2) * CELL_INCHES, (lines + 1.0) * LINE_INCHES)
    with matplotlib.rc_context({"text.parse_math": False, "font.family": FONT}):
        canvas = pyplot.figure(figsize=size)
        axes = canvas.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-1, WIDTH + 1), ylim=(lines + 1.0, 0))
        axes.axis("off")
        for view, start in zip(views, starts, strict=True):
            _draw_view(axes, view, start)
        _draw_key(axes, lines + 0.2)
        for suffix in (".png", ".pdf"):
            canvas.savefig(path.with_suffix(suffix), dpi=200)
        pyplot.close(canvas)


def _draw_view(axes: Any, view: ShownText, start: float) -> None:
    title = f"{view.student} guided by {view.teacher}, top {view.top_k:.0%}"
    if view.left_out:
        title += f" (the first {len(view.cells)} of {len(view.cells) + view.left_out} tokens)"
    axes.text(0, start - 0.75, title, fontsize=FONT_POINTS, va="center", family="DejaVu Sans")
    for cell in view.cells:
        top = start + cell.line
        _draw_box(axes, cell.column, top, cell.text, cell.state)
        at = cell.column + 0.1
        axes.text(at, top + 0.68, _drawable(cell.pieces), fontsize=5.6, va="center", color="0.35")


def _drawable(text: str) -> str:
    """A text with a box for every letter that the font does not have."""
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont(FONT))
    return "".join(x if font.get_char_index(ord(x)) else _NO_SIGN for x in text)


def _draw_box(axes: Any, column: float, top: float, text: str, state: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = _STYLES[state]
    box = FancyBboxPatch(
        (column, top + 0.02),
        max(_width(text), 1),
        0.4,
        boxstyle="round,pad=0,rounding_size=0.12",
        linewidth=0.8,
        **style["box"],
    )
    axes.add_patch(box)
    middle, shown = column + max(_width(text), 1) / 2, _drawable(text)
    place = {"ha": "center", "va": "center", "fontsize": FONT_POINTS}
    axes.text(middle, top + 0.23, shown, **place, **style["text"])


def _draw_key(axes: Any, top: float) -> None:
    column = 0.0
    for state in _STYLES:
        _draw_box(axes, column, top, state, state)
        column += _width(state) + 1.5
    note = f"below: the teacher's pieces; {_SAME_PIECE} the one of the token before again"
    axes.text(0, top + 0.72, note, fontsize=5.6, va="center", color="0.35")
