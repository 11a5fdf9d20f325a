"""Guidance views for a terminal and as one HTML file that needs no network and no colour.

What cannot be seen (control characters, directions of writing, zero width) is shown by name, so
that no text can draw on the page or the terminal.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import jinja2

from vocagnolm.hub import public_name
from vocagnolm.io import markdown_table
from vocagnolm.report.view import STATUSES, GuidanceView, Status, TextView, TokenView

# Of pages; every text is escaped.
TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("vocagnolm", "assets"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)
# Categories of Unicode.
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
_MARKS = {"kept": "[ ]", "dropped": " ", "unmapped": "{ }", "unlabelled": "( )"}


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
    return _visible(text).translate({ord(" "): "␣", ord("\n"): "↵", ord("\t"): "⇥"})


def _visible(text: str) -> str:
    return "".join(invisible_name(character) or character for character in text)


def token_label(token: TokenView) -> str:
    """Return what a token is called; the later parts of a character are a ring."""
    return token.text if token.is_special else label(token.text) or "◦"


def _settings_line(view: GuidanceView) -> str:
    method = view.method
    if method.accepts:
        return f"method {method.method} · selection accept"
    share = f"top_k {method.top_k:g} of {view.competition}"
    how = f"aggregation {method.aggregation} · unmapped {method.unmapped}"
    return f"method {method.method} · {share} · {how}"


def _summary(view: GuidanceView) -> list[list[str]]:
    """Count the tokens of each status, and all with a label, and average their losses."""
    labelled = [token for token in view.tokens if token.status != "unlabelled"]
    rows = [["tokens", "count", "trained", "student", "teacher", "excess"]]
    for name in (*STATUSES[:-1], "all"):
        tokens = [token for token in labelled if name in (token.status, "all")]
        share = len(tokens) / max(len(labelled), 1)
        trained = sum(token.weight for token in tokens)
        student = _mean(token.student_loss_nats for token in tokens)
        teacher = _mean(token.teacher_loss_nats for token in tokens)
        excess = _mean((token.excess_nats for token in tokens), "+")
        count = f"{len(tokens):,} ({share:.0%})"
        rows.append([name, count, f"{trained:,.0f}", student, teacher, excess])
    return rows


def _mean(values: Iterable[float | None], sign: str = "") -> str:
    """Average the values that are known, and write a minus sign for a hyphen."""
    known = [value for value in values if value is not None]
    return f"{fmean(known):{sign}.2f}".replace("-", "\u2212") if known else "\u2013"


def _heading(text: TextView) -> str:
    end = text.start + len(text.text)
    return f"document {text.document}, characters {text.start:,} to {end:,}, sequence {text.block}"


def render_text(view: GuidanceView) -> str:
    """Render texts, a legend and the summary for a terminal, tokens in brackets."""
    legend = " ".join(_mark(status, status) for status in STATUSES)
    lines = [f"{view.student} ← {view.teacher}", _settings_line(view), legend]
    for text in view.texts:
        # A token is on as many lines as it has.
        shown = [_visible(token.text).replace("\n", "↵\n") or "◦" for token in text.tokens]
        marked = map(_mark, shown, (token.status for token in text.tokens))
        lines += ["", _heading(text), "".join(marked)]
    lines += ["", markdown_table(_summary(view)), "Losses: means in nats per token.", ""]
    return "\n".join(lines)


def _mark(text: str, status: Status) -> str:
    before, _, after = _MARKS[status].partition(" ")
    return "\n".join(f"{before}{line}{after}" if line else "" for line in text.split("\n"))


def render_html(view: GuidanceView) -> str:
    """Render a page of its own: nothing is loaded, and every text is escaped."""
    # What the script shows of each token: label, status, losses, pieces; its weight by acceptance.
    facts: list[Any] = []
    for token in view.tokens:
        losses = [_finite(token.student_loss_nats), _finite(token.teacher_loss_nats)]
        pieces = [[label(text), _finite(loss)] for text, loss in token.pieces]
        weight = [round(token.weight, 2)] if view.method.accepts else []
        facts.append([token_label(token), token.status, *losses, pieces, *weight])
    known = [loss for fact in facts for loss in fact[2:4] if loss is not None]
    # Tokens are counted through the page: #t12 in its address chooses one.
    counted = iter(enumerate(view.tokens))
    return TEMPLATES.get_template("guidance.html").render(
        student=public_name(view.student),
        teacher=" and ".join(map(public_name, view.teacher.split(" and "))),
        settings=_settings_line(view),
        method=view.method,
        summary=_summary(view),
        texts=[(_heading(text), [next(counted) for _ in text.tokens]) for text in view.texts],
        invisible_name=invisible_name,
        facts={"tokens": facts, "scale": max(known, default=1.0)},
    )


def _finite(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
