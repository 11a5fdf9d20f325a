"""Guidance views for a terminal and as one HTML file that needs no network and no colour.

What cannot be seen (control characters, directions of writing, zero width) is shown by name, so
that no text can draw on the page or the terminal.
"""

from __future__ import annotations

import html
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vocagnolm.host.files import write_file, write_json
from vocagnolm.views.view import (
    STATUSES,
    GuidanceView,
    PieceView,
    Status,
    TextView,
    TokenView,
    ViewSettings,
    summarize,
    to_json,
)

_TEMPLATE = Path(__file__).parents[1] / "assets" / "inspection.html"
_BY_EXCESS = ("vocagnolm", "chunk")  # rho1 may add entropies to the losses
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # categories of Unicode
_COLORS: dict[Status, str] = {
    "kept": "1;30;43",  # bold, black on yellow
    "dropped": "2",  # dim
    "unmapped": "4;35",  # underlined, magenta
    "unlabelled": "2;3",  # dim, italic
}
_MARKS: dict[Status, tuple[str, str]] = {
    "kept": ("[", "]"),
    "dropped": ("", ""),
    "unmapped": ("{", "}"),
    "unlabelled": ("(", ")"),
}
_LONGEST_WORD = 40  # characters that a line may not break, where they begin with a space
_SUMMARY_HEAD = ("", "tokens", "trained", "student", "teacher", "excess")


def write_view(view: GuidanceView, directory: Path, name: str) -> None:
    """Write `NAME.json`, which `inspection.read_views` reads, and `NAME.html`, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", to_json(view))
    page = render_html(view).encode()
    write_file(directory / f"{name}.html", lambda file: file.write(page))


# -- Words and characters --------------------------------------------------------------------


def invisible_name(character: str) -> str | None:
    r"""What to show for a character that cannot be seen; None for all others, "\n" and "\t".

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
    r"""A token's characters on one line, each of them visible.

    >>> label(" 9\n")
    '␣9↵'
    """
    shown = (invisible_name(character) or character for character in text)
    return "".join(shown).translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def token_labels(text: TextView) -> list[str]:
    """The labels of all tokens; those that share a character say which part of it they are."""
    names = iter(_labels(text.text, [token for token in text.tokens if not token.is_special]))
    return [token.text if token.is_special else next(names) for token in text.tokens]


def _labels(text: str, tokens: Sequence[TokenView] | Sequence[PieceView]) -> list[str]:
    spans = [(token.start, token.end) for token in tokens]
    counts, seen = Counter(spans), Counter[tuple[int, int]]()
    labels = []
    for start, end in spans:
        seen[start, end] += 1
        part = f" ({seen[start, end]} of {counts[start, end]})" if counts[start, end] > 1 else ""
        labels.append(label(text[start:end]) + part)
    return labels


def reasons(settings: ViewSettings) -> dict[str, str]:
    """Why a token has its status; unmapped ones by whether they are trained."""
    score = "excess" if settings.method in _BY_EXCESS else "score"
    among = f"among the largest {settings.top_k * 100:.6g} %"
    alone = "no teacher loss to compare with"
    if settings.unmapped == "mean":
        alone = "it competed with the mean teacher loss, as it has none"
    return {
        "kept": f"Trained: its {score} is {among}.",
        "dropped": f"Not trained: its {score} is not {among}.",
        "unmapped trained": f"Trained; {alone}.",
        "unmapped": f"Not trained; {alone}.",
        "unlabelled": "Nothing to learn: no token before it predicts it.",
    }


def definition(settings: ViewSettings) -> str:
    """What the teacher's loss on a student token is."""
    if settings.method == "chunk":
        return f"the {settings.aggregation} over the teacher tokens of the same chunk"
    return f"the {settings.aggregation} over all teacher tokens that cover any of its characters"


def settings_line(settings: ViewSettings) -> str:
    """The settings in one line."""
    step = [] if settings.step is None else [f"step {settings.step:,}"]
    parts = [
        f"method {settings.method}",
        f"top_k {settings.top_k:g} of {settings.competition}",
        f"aggregation {settings.aggregation}",
        f"unmapped {settings.unmapped}",
    ]
    return " · ".join([*step, *parts])


def _number(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "\u2013"
    return f"{value:{'+' if signed else ''}.2f}".replace("-", "\u2212")  # a minus sign


def _status_key(token: TokenView) -> str:
    trained = token.status == "unmapped" and token.is_trained
    return "unmapped trained" if trained else token.status


def _summary_rows(view: GuidanceView) -> list[tuple[str, ...]]:
    """A row for each status, and one for all tokens with a label."""
    labelled = [token for token in view.tokens if token.status != "unlabelled"]
    groups: dict[str, list[TokenView]] = {
        status: [token for token in labelled if token.status == status]
        for status in STATUSES
        if status != "unlabelled"
    }
    rows: list[tuple[str, ...]] = []
    for name, tokens in (groups | {"all": labelled}).items():
        found = summarize(tokens)
        share = found.tokens / max(len(labelled), 1)
        rows.append(
            (
                name,
                f"{found.tokens:,} ({share:.0%})",
                f"{found.trained:,}",
                _number(found.student_nats),
                _number(found.teacher_nats),
                _number(found.excess_nats, signed=True),
            )
        )
    return rows


# -- The terminal ----------------------------------------------------------------------------


def render_text(view: GuidanceView, *, color: bool) -> str:
    """The texts with their tokens marked, a legend and the summary, for a terminal.

    Args:
        view: what to show.
        color: mark tokens by colour and weight; else with brackets.
    """
    settings = view.settings
    legend = " ".join(_paint(status, status, color) for status in STATUSES)
    lines = [f"{settings.student} \u2190 {settings.teacher}", settings_line(settings), legend]
    for text in view.texts:
        lines += ["", _heading(text)]
        lines.append("".join(_paint(_token_text(t), t.status, color) for t in text.tokens))
    summary = _table([_SUMMARY_HEAD, *_summary_rows(view)], right=range(1, 6))
    return "\n".join([*lines, "", summary, "Losses: means in nats per token.", ""])


def render_table(view: GuidanceView) -> str:
    """All tokens, one per line, with losses in nats and the teacher's pieces, for a terminal."""
    head = ("#", "token", "status", "student", "teacher", "excess", "teacher pieces")
    rows: list[tuple[str, ...]] = [head]
    for text in view.texts:
        for name, token in zip(token_labels(text), text.tokens, strict=True):
            rows.append((str(len(rows) - 1), name, *token_cells(token, text.text)))
    return _table(rows, right=(0, 3, 4, 5)) + "\n"


def token_cells(token: TokenView, text: str) -> tuple[str, str, str, str, str]:
    """Status, both losses, excess (nats) and the pieces of a token, as words."""
    names = _labels(text, token.pieces)
    pieces = (
        f"{name} {_number(piece.loss_nats)}"
        for name, piece in zip(names, token.pieces, strict=True)
    )
    return (
        _status_key(token),
        _number(token.student_loss_nats),
        _number(token.teacher_loss_nats),
        _number(token.excess_nats, signed=True),
        " | ".join(pieces),
    )


def _heading(text: TextView) -> str:
    end = text.start + len(text.text)
    return f"document {text.document}, characters {text.start:,} to {end:,}, sequence {text.block}"


def _token_text(token: TokenView) -> str:
    """What a token shows in a terminal; the later parts of a character show a ring."""
    shown = (invisible_name(character) or character for character in token.text)
    return "".join(shown).replace("\n", "↵\n") or "\u25e6"


def _paint(text: str, status: Status, color: bool) -> str:
    before, after = _MARKS[status]
    if color:
        before, after = f"\x1b[{_COLORS[status]}m", "\x1b[0m"
    # A line end stays outside: a background would run to the edge of the terminal.
    return "\n".join(f"{before}{line}{after}" if line else "" for line in text.split("\n"))


def _table(rows: Sequence[Sequence[str]], right: Iterable[int]) -> str:
    widths = [max(map(_width, column)) for column in zip(*rows, strict=True)]
    right = set(right)
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            space = " " * (width - _width(cell))
            cells.append(space + cell if column in right else cell + space)
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _width(text: str) -> int:
    """Columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


# -- HTML ------------------------------------------------------------------------------------


def render_html(view: GuidanceView) -> str:
    """A page of its own: nothing is loaded, and every text is escaped."""
    settings = view.settings
    losses = [
        loss
        for token in view.tokens
        for loss in (token.student_loss_nats, token.teacher_loss_nats)
        if loss is not None and math.isfinite(loss)
    ]
    numbers = iter(range(len(view.tokens)))
    data: list[list[Any]] = []
    sections = []
    for text in view.texts:
        names = token_labels(text)
        spans = [
            _token_html(next(numbers), name, token)
            for name, token in zip(names, text.tokens, strict=True)
        ]
        data += [
            _token_data(name, token, text.text)
            for name, token in zip(names, text.tokens, strict=True)
        ]
        sections.append(
            f'<section><h2>{html.escape(_heading(text))}</h2><div class="text" dir="auto" '
            'role="listbox" aria-orientation="horizontal" aria-label="Tokens of the text">'
            f"{''.join(spans)}</div></section>"
        )
    facts = {
        "tokens": data,
        "reasons": reasons(settings),
        "aggregation": "" if settings.method == "chunk" else settings.aggregation,
        "scale": max(losses, default=1.0),
    }
    parts = {
        "student": html.escape(settings.student),
        "teacher": html.escape(settings.teacher),
        "settings": html.escape(settings_line(settings)),
        "definition": html.escape(definition(settings)),
        "summary": _summary_html(view),
        "texts": "\n".join(sections),
        "facts": json.dumps(facts, allow_nan=False).replace("<", "\\u003c"),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)  # in a single pass


def _summary_html(view: GuidanceView) -> str:
    rows = []
    for name, *cells in _summary_rows(view):
        sample = f'<span class="token {name}">{name}</span>' if name in STATUSES else name
        rows.append(
            f'<tr><th scope="row">{sample}</th>'
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return "\n".join(rows)


def _token_html(number: int, name: str, token: TokenView) -> str:
    classes = ["token", token.status]
    classes += ["special"] * token.is_special + ["part"] * (not token.text)
    is_word = token.text.startswith(" ") and len(token.text) <= _LONGEST_WORD
    classes += ["word"] * is_word
    classes += ["untrained"] * (token.status == "unmapped" and not token.is_trained)
    values = (
        f"{what} {_number(value)} nats"
        for what, value in (
            ("student", token.student_loss_nats),
            ("teacher", token.teacher_loss_nats),
        )
        if value is not None
    )
    spoken = html.escape(", ".join([name, _status_key(token), *values]))
    return (
        f'{"<wbr>" * is_word}<span class="{" ".join(classes)}" id="t{number}" role="option" '
        f'aria-selected="false" tabindex="{0 if number == 0 else -1}" aria-label="{spoken}">'
        f"{''.join(map(_character_html, token.text))}</span>"
    )


def _character_html(character: str) -> str:
    """One character; an empty element draws a sign before one that is blank."""
    if name := invisible_name(character):
        return f"<b>{name}</b>"
    return {"\n": "<i></i>\n", "\t": '<i class="tab"></i>\t'}.get(character, html.escape(character))


def _token_data(name: str, token: TokenView, text: str) -> list[Any]:
    """What the script shows of a token: label, status, losses, then its pieces."""
    names = _labels(text, token.pieces)
    return [
        name,
        _status_key(token),
        _finite(token.student_loss_nats),
        _finite(token.teacher_loss_nats),
        [
            [piece_name, piece.start, piece.end, _finite(piece.loss_nats)]
            for piece_name, piece in zip(names, token.pieces, strict=True)
        ],
    ]


def _finite(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
