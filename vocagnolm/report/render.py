"""Guidance views for a terminal and as an HTML file that needs neither network nor colour.

Invisible characters (control characters, writing directions, zero width) are shown by name, so no
text can draw on the page or the terminal.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import jinja2

from vocagnolm.report.view import GuidanceView, Status, TextView
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import markdown_table

# Pages are made from these templates. All text is escaped, so no document can add elements.
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("vocagnolm", "assets"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
# Characters of these Unicode categories are invisible, or move what is around them.
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_MARKS: dict[Status, str] = {"kept": "[ ]", "dropped": " ", "unmapped": "{ }", "unlabelled": "( )"}


def invisible_name(character: str) -> str | None:
    r"""Name an invisible character. None for all others, and for "\n" and "\t".

    >>> invisible_name("\x1b"), invisible_name("\u202e"), invisible_name("x")
    ('␛', 'U+202E', None)
    """
    code = ord(character)
    # A text keeps its lines and tabs, which are harmless.
    if character in "\n\t" or unicodedata.category(character) not in _INVISIBLE:
        return None
    # Unicode has pictures of the first control characters from U+2400 on, in the same order.
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"U+{code:04X}"


def label(text: str) -> str:
    r"""Write a token's characters on one line, all of them visible.

    >>> label(" 9\n")
    '␣9↵'
    """
    return _visible(text).translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def _visible(text: str) -> str:
    return "".join(invisible_name(character) or character for character in text)


def _settings_line(view: GuidanceView) -> str:
    method = view.method
    if method.accepts:
        return f"method {method.method} · selection accept"
    share = f"top_k {method.top_k:g} of each text's mapped tokens"
    mapping = f"aggregation {method.aggregation} · unmapped {method.unmapped}"
    return f"method {method.method} · {share} · {mapping}"


def _summary(view: GuidanceView) -> list[list[str]]:
    """Count the tokens by status, and all labelled ones, and average their losses."""
    labelled = [token for token in view.tokens if token.status != "unlabelled"]
    rows = [["tokens", "count", "trained", "student", "teacher", "excess"]]
    for name in ("kept", "dropped", "unmapped", "all"):
        tokens = [token for token in labelled if name in (token.status, "all")]
        share = len(tokens) / max(len(labelled), 1)
        trained = sum(token.weight for token in tokens)
        student = _mean([token.student_loss_nats for token in tokens])
        teacher = _mean([token.teacher_loss_nats for token in tokens])
        excess = _mean([token.excess_nats for token in tokens], sign="+")
        count = f"{len(tokens):,} ({share:.0%})"
        rows.append([name, count, f"{trained:,.0f}", student, teacher, excess])
    return rows


def _mean(values: Iterable[float | None], sign: str = "") -> str:
    """Average the values that are not None, with a real minus sign."""
    # These two characters are a dash for no value and the minus sign.
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "\u2013"
    return f"{fmean(numbers):{sign}.2f}".replace("-", "\u2212")


def _heading(text: TextView) -> str:
    end = text.start + len(text.text)
    return f"document {text.document}, characters {text.start:,} to {end:,}"


def render_text(view: GuidanceView) -> str:
    """Render texts, a legend and the summary for a terminal, with tokens in brackets."""
    marks = dict(_MARKS)
    # Acceptance keeps nearly every token, so the brackets show what it drops.
    if view.method.accepts:
        marks |= {"kept": _MARKS["dropped"], "dropped": _MARKS["kept"]}
    legend = " ".join(_mark(status, mark) for status, mark in marks.items())
    lines = [f"{view.student} ← {view.teacher}", _settings_line(view), legend]
    for text in view.texts:
        marked_text = ""
        for token in text.tokens:
            # The later tokens of one character have no text of their own, and show as a ring.
            visible = _visible(token.text).replace("\n", "↵\n") or "◦"
            marked_text += _mark(visible, marks[token.status])
        lines += ["", _heading(text), marked_text]
    lines += ["", markdown_table(_summary(view)), "Losses: means in nats per token.", ""]
    return "\n".join(lines)


def _mark(text: str, mark: str) -> str:
    """Put brackets around a token, on each of its lines."""
    # The space in a mark stands for the token.
    before, _, after = mark.partition(" ")
    lines = text.split("\n")
    return "\n".join(f"{before}{line}{after}" if line else "" for line in lines)


def render_html(view: GuidanceView) -> str:
    """Render a self-contained page. It loads nothing, and all text is escaped."""
    # For each token, the script shows its label, status, losses, pieces and weight.
    facts: list[list[Any]] = []
    # The bars of all losses have the same scale.
    largest_loss = 0.0
    for token in view.tokens:
        student_loss = _finite(token.student_loss_nats)
        teacher_loss = _finite(token.teacher_loss_nats)
        pieces = [[label(text), _finite(loss)] for text, loss in token.pieces]
        # The later parts of a character are a ring.
        name = token.text if token.is_special else label(token.text) or "◦"
        fact = [name, token.status, student_loss, teacher_loss, pieces, round(token.weight, 2)]
        facts.append(fact)
        largest_loss = max(largest_loss, student_loss or 0.0, teacher_loss or 0.0)
    return TEMPLATES.get_template("guidance.html").render(
        student=public_name(view.student),
        teacher=public_name(view.teacher),
        settings=_settings_line(view),
        method=view.method,
        summary=_summary(view),
        texts=view.texts,
        heading=_heading,
        invisible_name=invisible_name,
        facts={"tokens": facts, "scale": largest_loss or 1.0},
    )


def _finite(value: float | None) -> float | None:
    """Round a loss for JSON, which has no NaN."""
    return round(value, 4) if value is not None and math.isfinite(value) else None
