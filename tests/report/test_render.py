"""The guidance view in a terminal and as a page: complete, and not driven by the text."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.method import Method
from vocagnolm.report.render import invisible_name, label, render_html, render_text
from vocagnolm.report.view import GuidanceView, Status, TextView, TokenView

VIEW = GuidanceView("stu<dent>", "teach&er", Method())
HOSTILE = (
    "<script>alert('1')</script>\"&amp;' \x1b[31m\x00\r\n\u05e9\u05dc\u05d5\u05dd \u202eabc\u200b\t"
    "</script><!-- {{facts}} \u2028 🧮 é"
)
# The second and third token are the later parts of a character.
TOKENS = (
    TokenView("<s>", 0, 0, "unlabelled", 0.0, None, None),
    TokenView("🧮", 0, 1, "kept", 0.75, 3.0, 1.0, (("🧮", 1.0),)),
    TokenView("", 0, 1, "dropped", 0.125, 1.0, 2.0),
    TokenView("</s>", 1, 1, "unmapped", 1.0, float("inf"), None),
)
ONE = replace(VIEW, texts=(TextView("🧮", 0, 0, TOKENS),))


def hostile_view(width: int) -> GuidanceView:
    """Cut the text into tokens of `width` characters."""
    tokens = []
    for start in range(0, len(HOSTILE), width):
        text = HOSTILE[start : start + width]
        status: Status = ("kept", "dropped")[start % 2]
        tokens.append(TokenView(text, start, start + len(text), status, 1.0, 1.5, 0.5))
    return replace(VIEW, texts=(TextView(HOSTILE, 0, 0, tuple(tokens)),))


def tokens_of(page: str) -> list[str]:
    """The texts of a page's tokens, as a browser without script would show them."""
    tokens = re.findall(r'<a class="[^"]*"[^>]* id="t\d+"[^>]*>(.*?)</a>', page, re.DOTALL)
    return [html.unescape(re.sub("<[^>]*>", "", token)) for token in tokens]


def facts_of(page: str) -> dict[str, Any]:
    (facts,) = re.findall(r'<script id="facts" [^>]*>(.*?)</script>', page, re.DOTALL)
    return json.loads(facts)


@pytest.mark.parametrize("width", [1, 3, 100])
def test_page_shows_every_character_and_obeys_none(width: int) -> None:
    page = render_html(hostile_view(width))
    visible = "".join(invisible_name(character) or character for character in HOSTILE)
    assert "".join(tokens_of(page)) == visible
    assert page.count("<script") == page.count("</script>") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", page)
    assert "stu&lt;dent&gt;" in page
    assert "teach&amp;er" in page
    assert facts_of(page)["tokens"][0][0] == label(HOSTILE[:width])
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=\"(?!#)|https?://|@import|url\(", page)


def test_page_has_facts_of_each_token() -> None:
    page = render_html(ONE)
    facts = facts_of(page)
    assert facts["scale"] == 3.0
    assert facts["tokens"] == [
        ["<s>", "unlabelled", None, None, [], 0.0],
        ["🧮", "kept", 3.0, 1.0, [["🧮", 1.0]], 0.75],
        ["◦", "dropped", 1.0, 2.0, [], 0.12],
        # JSON has no infinity.
        ["</s>", "unmapped", None, None, [], 1.0],
    ]
    assert "style=" not in page
    # The script divides by the scale of the bars.
    assert facts_of(render_html(VIEW))["scale"] == 1.0


def test_page_has_shades_of_weights_and_no_path_of_the_machine(tmp_path: Path) -> None:
    view = replace(ONE, student=str(tmp_path / "mine"), method=Method(selection="accept"))
    page = render_html(view)
    assert re.findall(r'style="--weight: (\d+)%"', page) == ["75", "12", "100"]
    assert str(tmp_path) not in page
    assert "mine" in page


def test_terminal_marks_tokens_and_is_not_driven_by_the_text() -> None:
    assert "(<s>)[🧮]◦{</s>}" in render_text(ONE)
    # Acceptance drops few, so these are marked.
    accepted = render_text(replace(ONE, method=Method(selection="accept")))
    assert "(<s>)🧮[◦]{</s>}" in accepted
    assert "kept [dropped] {unmapped}" in accepted
    out = render_text(hostile_view(1))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "␛" in out


def test_summary_averages_known_losses() -> None:
    tokens = (*TOKENS[:3], TokenView("</s>", 1, 1, "unmapped", 1.0, 5.0, None))
    out = " ".join(render_text(replace(VIEW, texts=(TextView("🧮", 0, 0, tokens),))).split())
    assert "| all | 3 (100%) | 2 | 3.00 | 1.50 | +0.50 |" in out
    assert "| unmapped | 1 (33%) | 1 | 5.00 | \u2013 | \u2013 |" in out
    assert "0 (0%)" in render_text(VIEW)
