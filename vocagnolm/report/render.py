"""Guidance views for a terminal and as one HTML file that needs no network and no colour.

What cannot be seen (control characters, directions of writing, zero width) is shown by name, so
that no text can draw on the page or the terminal.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from vocagnolm.io import write_json, write_text
from vocagnolm.report.page import render_page
from vocagnolm.report.view import (
    STATUSES,
    GuidanceView,
    PieceView,
    Status,
    TextView,
    TokenView,
    ViewSettings,
)
from vocagnolm.run.card import public_name

# Categories of Unicode.
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_COLORS: dict[Status, str] = {
    "kept": "1;30;43",  # bold, black on yellow
    "dropped": "2",  # dim
    "unmapped": "4;35",  # underlined, magenta
    "unlabelled": "2;3",  # dim, italic
}
_MARKS: dict[Status, str] = {"kept": "[ ]", "dropped": " ", "unmapped": "{ }", "unlabelled": "( )"}


def write_view(view: GuidanceView, directory: Path, name: str) -> None:
    """Write `NAME.json` and `NAME.html`, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", view.to_json())
    write_text(directory / f"{name}.html", render_html(view))


# -- Words and characters --------------------------------------------------------------------


def invisible_name(character: str) -> str | None:
    r"""Name a character that cannot be seen; None for all others, "\n" and "\t".

    >>> invisible_name("\x1b"), invisible_name("\u202e"), invisible_name("x")
    ('␛', 'U+202E', None)
    """
    code = ord(character)
    if character in "\n\t" or unicodedata.category(character) not in _INVISIBLE:
        return None
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"U+{code:04X}"


def label(text: str) -> str:
    r"""Write a token's characters on one line, each of them visible.

    >>> label(" 9\n")
    '␣9↵'
    """
    shown = (invisible_name(character) or character for character in text)
    return "".join(shown).translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def labelled_tokens(view: GuidanceView) -> list[tuple[str, TokenView]]:
    """List all tokens with their labels; parts of one character are numbered."""
    found: list[tuple[str, TokenView]] = []
    for text in view.texts:
        inside = [token for token in text.tokens if not token.is_special]
        labels = _labels(inside, (text.text[token.start : token.end] for token in inside))
        found += [(x.text if x.is_special else next(labels), x) for x in text.tokens]
    return found


def _labels(tokens: Sequence[TokenView | PieceView], texts: Iterable[str]) -> Iterator[str]:
    spans = [(token.start, token.end) for token in tokens]
    counts, seen = Counter(spans), Counter[tuple[int, int]]()
    # The bytes of one character have the same span: "é (1 of 2)", "é (2 of 2)".
    for span, text in zip(spans, texts, strict=True):
        seen[span] += 1
        part = f" ({seen[span]} of {counts[span]})" if counts[span] > 1 else ""
        yield label(text) + part


def _pieces(token: TokenView) -> Iterator[tuple[str, PieceView]]:
    """Label the teacher's tokens behind a token."""
    names = _labels(token.pieces, (piece.text for piece in token.pieces))
    return zip(names, token.pieces, strict=True)


def _settings_line(settings: ViewSettings) -> str:
    method = settings.method
    step = [] if settings.step is None else [f"step {settings.step:,}"]
    parts = (
        *step,
        f"method {method.method}",
        f"top_k {method.top_k:g} of {settings.competition}",
        f"aggregation {method.aggregation}",
        f"unmapped {method.unmapped}",
    )
    return " · ".join(parts)


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "\u2013"
    return f"{value:{'+' if signed else ''}.2f}".replace("-", "\u2212")  # a minus sign


def _summary(view: GuidanceView) -> list[list[str]]:
    """Count the tokens of each status, and all with a label, and average their losses."""
    labelled = [token for token in view.tokens if token.status != "unlabelled"]
    rows = [["tokens", "count", "trained", "student", "teacher", "excess"]]
    for name in (*STATUSES[:-1], "all"):
        tokens = [token for token in labelled if name in (token.status, "all")]
        share = len(tokens) / max(len(labelled), 1)
        row = [name, f"{len(tokens):,} ({share:.0%})"]
        row.append(f"{sum(token.is_trained for token in tokens):,}")
        row.append(_number(_mean(token.student_loss_nats for token in tokens)))
        row.append(_number(_mean(token.teacher_loss_nats for token in tokens)))
        row.append(_number(_mean(token.excess_nats for token in tokens), signed=True))
        rows.append(row)
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def token_cells(token: TokenView) -> tuple[str, str, str, str, str]:
    """Write status, both losses, excess (nats) and the pieces of a token as words."""
    return (
        token.status_key,
        _number(token.student_loss_nats),
        _number(token.teacher_loss_nats),
        _number(token.excess_nats, signed=True),
        " | ".join(f"{name} {_number(piece.loss_nats)}" for name, piece in _pieces(token)),
    )


def _heading(text: TextView) -> str:
    end = text.start + len(text.text)
    return f"document {text.document}, characters {text.start:,} to {end:,}, sequence {text.block}"


# -- The terminal ----------------------------------------------------------------------------


def render_text(view: GuidanceView, *, color: bool) -> str:
    """Render texts, a legend and the summary for a terminal, tokens in colour or in brackets."""
    settings = view.settings
    legend = " ".join(_paint(status, status, color) for status in STATUSES)
    lines = [f"{settings.student} \u2190 {settings.teacher}", _settings_line(settings), legend]
    for text in view.texts:
        parts = []
        for token in text.tokens:
            if token.turn is not None:
                parts.append(f"\n\u2500\u2500 {label(token.turn)}\n")
            parts.append(_paint(_token_text(token), token.status, color))
        lines += ["", _heading(text), "".join(parts)]
    summary = _table(_summary(view), right=range(1, 6))
    return "\n".join([*lines, "", summary, "Losses: means in nats per token.", ""])


def render_table(view: GuidanceView) -> str:
    """List all tokens for a terminal, with losses in nats and the teacher's pieces."""
    rows: list[Sequence[str]] = []
    rows.append(("#", "token", "status", "student", "teacher", "excess", "teacher pieces"))
    for number, (name, token) in enumerate(labelled_tokens(view)):
        rows.append((str(number), name, *token_cells(token)))
    return _table(rows, right=(0, 3, 4, 5)) + "\n"


def _token_text(token: TokenView) -> str:
    """Show a token in a terminal; the later parts of a character show a ring."""
    shown = (invisible_name(character) or character for character in token.text)
    return "".join(shown).replace("\n", "↵\n") or "\u25e6"


def _paint(text: str, status: Status, color: bool) -> str:
    before, _, after = _MARKS[status].partition(" ")
    if color:
        before, after = f"\x1b[{_COLORS[status]}m", "\x1b[0m"
    # A line end stays outside: a background would run to the edge of the terminal.
    return "\n".join(f"{before}{line}{after}" if line else "" for line in text.split("\n"))


def _table(rows: Sequence[Sequence[str]], right: Container[int]) -> str:
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for place, cell in enumerate(row):
            space = " " * (widths[place] - _width(cell))
            cells.append(space + cell if place in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    """Count the columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


# -- HTML ------------------------------------------------------------------------------------


def render_html(view: GuidanceView) -> str:
    """Render a page of its own: nothing is loaded, and every text is escaped."""
    settings = view.settings
    tokens = labelled_tokens(view)
    losses = [loss for _, x in tokens for loss in (x.student_loss_nats, x.teacher_loss_nats)]
    # Tokens are numbered through the page: #t12 in its address chooses one.
    numbered = enumerate(token for _, token in tokens)
    return render_page(
        "guidance.html",
        student=public_name(settings.student),
        teacher=" and ".join(map(public_name, settings.teacher.split(" and "))),
        settings=_settings_line(settings),
        method=settings.method,
        summary=_summary(view),
        statuses=STATUSES,
        texts=[
            (_heading(text), [(gap, *next(numbered)) for gap in _gaps(text)]) for text in view.texts
        ],
        invisible_name=invisible_name,
        label=label,
        facts={
            "tokens": [_facts(name, token) for name, token in tokens],
            "scale": max((x for x in losses if x is not None and math.isfinite(x)), default=1.0),
        },
    )


def _gaps(text: TextView) -> Iterator[str]:
    """Yield the characters before each token that none has, as between two messages."""
    shown = 0
    for token in text.tokens:
        if token.is_special:
            yield ""
        else:
            yield text.text[shown : token.start]
            shown = token.end


def _facts(name: str, token: TokenView) -> list[object]:
    """List what the script shows of a token: label, status, losses, then its pieces."""
    pieces = [[piece_name, _finite(piece.loss_nats)] for piece_name, piece in _pieces(token)]
    losses = (_finite(token.student_loss_nats), _finite(token.teacher_loss_nats))
    return [name, token.status_key, *losses, pieces]


def _finite(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
