"""Guidance views for a terminal and as one HTML file that needs no network and no colour.

What cannot be seen (control characters, directions of writing, zero width) is shown by name, so
that no text can draw on the page or the terminal.
"""

from __future__ import annotations

import itertools
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import jinja2

from vocagnolm.host.files import write_file, write_json
from vocagnolm.views.view import (
    STATUSES,
    GuidanceView,
    PieceView,
    Status,
    TextView,
    TokenView,
    ViewSettings,
    summarize_tokens,
    to_json,
)

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("vocagnolm", "assets"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
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
    """Write `NAME.json`, which `view.read_views` reads, and `NAME.html`, each atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{name}.json", to_json(view))
    page = render_html(view).encode()
    write_file(directory / f"{name}.html", lambda file: file.write(page))


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


def token_labels(text: TextView) -> list[str]:
    """Label all tokens; those that share a character say which part of it they are."""
    names = iter(_labels(text.text, [token for token in text.tokens if not token.is_special]))
    return [token.text if token.is_special else next(names) for token in text.tokens]


def _labels(text: str, tokens: Sequence[TokenView] | Sequence[PieceView]) -> list[str]:
    spans = [(token.start, token.end) for token in tokens]
    counts, seen = Counter(spans), Counter[tuple[int, int]]()
    # The bytes of one character have the same span: "é (1 of 2)", "é (2 of 2)".
    labels = []
    for start, end in spans:
        seen[start, end] += 1
        part = f" ({seen[start, end]} of {counts[start, end]})" if counts[start, end] > 1 else ""
        labels.append(label(text[start:end]) + part)
    return labels


def reasons(settings: ViewSettings) -> dict[str, str]:
    """Explain each status; unmapped tokens have two, trained and not."""
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
    """Define the teacher's loss on a student token."""
    if settings.method == "chunk":
        return f"the {settings.aggregation} over the teacher tokens of the same chunk"
    return f"the {settings.aggregation} over all teacher tokens that cover any of its characters"


def settings_line(settings: ViewSettings) -> str:
    """Write the settings in one line."""
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
    """Summarise each status, and all tokens with a label."""
    labelled = [token for token in view.tokens if token.status != "unlabelled"]
    groups: dict[str, list[TokenView]] = {
        status: [token for token in labelled if token.status == status]
        for status in STATUSES
        if status != "unlabelled"
    }
    rows: list[tuple[str, ...]] = []
    for name, tokens in (groups | {"all": labelled}).items():
        found = summarize_tokens(tokens)
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
    """Render texts, a legend and the summary for a terminal, tokens in colour or in brackets."""
    settings = view.settings
    legend = " ".join(_paint(status, status, color) for status in STATUSES)
    lines = [f"{settings.student} \u2190 {settings.teacher}", settings_line(settings), legend]
    for text in view.texts:
        lines += ["", _heading(text)]
        lines.append("".join(_paint(_token_text(t), t.status, color) for t in text.tokens))
    summary = _table([_SUMMARY_HEAD, *_summary_rows(view)], right=range(1, 6))
    return "\n".join([*lines, "", summary, "Losses: means in nats per token.", ""])


def render_table(view: GuidanceView) -> str:
    """List all tokens for a terminal, with losses in nats and the teacher's pieces."""
    head = ("#", "token", "status", "student", "teacher", "excess", "teacher pieces")
    rows: list[tuple[str, ...]] = [head]
    for text in view.texts:
        for name, token in zip(token_labels(text), text.tokens, strict=True):
            rows.append((str(len(rows) - 1), name, *token_cells(token, text.text)))
    return _table(rows, right=(0, 3, 4, 5)) + "\n"


def token_cells(token: TokenView, text: str) -> tuple[str, str, str, str, str]:
    """Write status, both losses, excess (nats) and the pieces of a token as words."""
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
    """Show a token in a terminal; the later parts of a character show a ring."""
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
    """Count the columns of a terminal."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


# -- HTML ------------------------------------------------------------------------------------


def render_html(view: GuidanceView) -> str:
    """Render a page of its own: nothing is loaded, and every text is escaped."""
    settings = view.settings
    losses = (loss for t in view.tokens for loss in (t.student_loss_nats, t.teacher_loss_nats))
    numbers = itertools.count()
    # Tokens are numbered through the page: #t12 in its address chooses one.
    texts, facts = [], []
    for text in view.texts:
        tokens = []
        for name, token in zip(token_labels(text), text.tokens, strict=True):
            tokens.append(_token_parts(next(numbers), name, token))
            facts.append(_token_facts(name, token, text.text))
        texts.append({"heading": _heading(text), "tokens": tokens})
    return _TEMPLATES.get_template("guidance.html").render(
        student=settings.student,
        teacher=settings.teacher,
        settings=settings_line(settings),
        definition=definition(settings),
        summary=_summary_rows(view),
        statuses=STATUSES,
        texts=texts,
        invisible_name=invisible_name,
        facts={
            "tokens": facts,
            "reasons": reasons(settings),
            "aggregation": "" if settings.method == "chunk" else settings.aggregation,
            "scale": max((x for x in losses if x is not None and math.isfinite(x)), default=1.0),
        },
    )


def _token_parts(number: int, name: str, token: TokenView) -> dict[str, object]:
    """Prepare a token for the template."""
    is_word = token.text.startswith(" ") and len(token.text) <= _LONGEST_WORD
    classes = {
        "token": True,
        token.status: True,
        "special": token.is_special,
        "part": not token.text,
        "word": is_word,
        "untrained": token.status == "unmapped" and not token.is_trained,
    }
    losses = {"student": token.student_loss_nats, "teacher": token.teacher_loss_nats}
    spoken = [f"{role} {_number(x)} nats" for role, x in losses.items() if x is not None]
    return {
        "number": number,
        "classes": " ".join(name for name, is_one in classes.items() if is_one),
        "is_word": is_word,
        "spoken": ", ".join([name, _status_key(token), *spoken]),
        "text": token.text,
    }


def _token_facts(name: str, token: TokenView, text: str) -> list[object]:
    """List what the script shows of a token: label, status, losses, then its pieces."""
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
