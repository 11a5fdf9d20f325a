"""The guidance view in a terminal and as a page: complete, and not driven by the text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
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


class Page(HTMLParser):
    """The tokens of a page, as a browser without script would see them."""

    def __init__(self, html: str):
        super().__init__()
        self.tokens: list[dict[str, str]] = []
        self._depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._depth:
            self._depth += tag in ("b", "i")
        elif tag == "a":
            self.tokens.append({name: value or "" for name, value in attrs} | {"text": ""})
            self._depth = 1

    def handle_endtag(self, tag: str) -> None:
        self._depth -= bool(self._depth) and tag in ("b", "i", "a")

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.tokens[-1]["text"] += data


def facts_of(html: str) -> dict[str, Any]:
    facts = re.search(r'<script id="facts" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert facts is not None
    return json.loads(facts[1])


@pytest.mark.parametrize("width", [1, 3, 100])
def test_page_shows_every_character_and_obeys_none(width: int) -> None:
    html = render_html(hostile_view(width))
    page = Page(html)
    visible = "".join(invisible_name(character) or character for character in HOSTILE)
    assert "".join(token["text"] for token in page.tokens) == visible
    assert [token["id"] for token in page.tokens] == [f"t{n}" for n in range(len(page.tokens))]
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", html)
    assert "stu&lt;dent&gt;" in html
    assert "teach&amp;er" in html
    assert facts_of(html)["tokens"][0][0] == label(HOSTILE[:width])
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=\"(?!#)|https?://|@import|url\(", html)


def test_page_has_facts_of_each_token() -> None:
    html = render_html(ONE)
    facts = facts_of(html)
    assert facts["scale"] == 3.0
    assert facts["tokens"] == [
        ["<s>", "unlabelled", None, None, [], 0.0],
        ["🧮", "kept", 3.0, 1.0, [["🧮", 1.0]], 0.75],
        ["◦", "dropped", 1.0, 2.0, [], 0.12],
        # JSON has no infinity.
        ["</s>", "unmapped", None, None, [], 1.0],
    ]
    classes = [token["class"].split()[1] for token in Page(html).tokens]
    assert classes == ["unlabelled", "kept", "dropped", "unmapped"]
    assert "style=" not in html
    # The script divides by the scale of the bars.
    assert facts_of(render_html(VIEW))["scale"] == 1.0


def test_weights_by_acceptance_are_shades() -> None:
    html = render_html(replace(ONE, method=Method(selection="accept")))
    assert re.findall(r'style="--weight: (\d+)%"', html) == ["75", "12", "100"]


def test_page_names_no_path_of_the_machine(tmp_path: Path) -> None:
    html = render_html(replace(ONE, student=str(tmp_path / "mine"), teacher="Qwen/Qwen2.5"))
    assert str(tmp_path) not in html
    assert "mine" in html
    assert "Qwen/Qwen2.5" in html


def test_terminal_marks_tokens_and_is_not_driven_by_the_text() -> None:
    assert "(<s>)[🧮]◦{</s>}" in render_text(ONE)
    out = render_text(hostile_view(1))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "␛" in out


def test_summary_averages_known_losses() -> None:
    tokens = (*TOKENS[:3], TokenView("</s>", 1, 1, "unmapped", 1.0, 5.0, None))
    out = render_text(replace(VIEW, texts=(TextView("🧮", 0, 0, tokens),)))
    rows = {}
    for line in out.splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[name] = cells
    assert rows["all"] == ["3 (100%)", "2", "3.00", "1.50", "+0.50"]
    assert rows["unmapped"] == ["1 (33%)", "1", "5.00", "\u2013", "\u2013"]
    assert "0 (0%)" in render_text(VIEW)
