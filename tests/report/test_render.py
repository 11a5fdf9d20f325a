"""The guidance view in a terminal and as a page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from vocagnolm.method import Method
from vocagnolm.report.render import (
    invisible_name,
    label,
    render_html,
    render_text,
    token_label,
)
from vocagnolm.report.view import GuidanceView, Status, TextView, TokenView

VIEW = GuidanceView("stu<dent>", "teach&er", Method(), "each text")
HOSTILE = (
    "<script>alert('1')</script>\"&amp;' \x1b[31m\x00\r\n\u05e9\u05dc\u05d5\u05dd \u202eabc\u200b\t"
    "</script><!-- {{facts}} \u2028 🧮 é"
)


def make_view(*texts: str, width: int = 3) -> GuidanceView:
    """Cut texts into tokens of `width` characters, with a piece for each character of a token."""
    return replace(VIEW, texts=tuple(make_text(text, width) for text in texts))


def make_text(text: str, width: int) -> TextView:
    tokens = [TokenView("<s>", 0, 0, "unlabelled", False, None, None)]
    for number, start in enumerate(range(0, len(text), width)):
        end = min(start + width, len(text))
        pieces = tuple((text[i], i / 2) for i in range(start, end))
        status: Status = ("kept", "dropped")[number % 2]
        token = TokenView(text[start:end], start, end, status, not number % 2, 1.5, end / 2, pieces)
        tokens.append(token)
    tokens.append(TokenView("</s>", len(text), len(text), "unmapped", True, 0.25, None))
    return TextView(text, 0, 0, 0, tuple(tokens))


class Page(HTMLParser):
    """The tokens of a page, as a browser without script would see them."""

    def __init__(self, html: str):
        super().__init__()
        self.tokens: list[dict[str, str]] = []
        self.scripts = 0
        self._depth = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.scripts += tag == "script"
        if self._depth:
            self._depth += tag in ("b", "i")
        elif tag == "a":
            self.tokens.append(found | {"text": ""})
            self._depth = 1

    def handle_endtag(self, tag: str) -> None:
        self._depth -= bool(self._depth) and tag in ("b", "i", "a")

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.tokens[-1]["text"] += data


def facts_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="facts" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_shows_every_character_once_in_order() -> None:
    page = Page(render_html(make_view(HOSTILE, "b")))
    inside = [token for token in page.tokens if "special" not in token["class"]]
    visible = "".join(invisible_name(character) or character for character in HOSTILE)
    assert "".join(token["text"] for token in inside) == visible + "b"
    assert [token["id"] for token in page.tokens] == [f"t{n}" for n in range(len(page.tokens))]


@pytest.mark.parametrize("width", [3, 100])
def test_page_escapes_every_text_and_loads_nothing(width: int) -> None:
    html = render_html(make_view(HOSTILE, width=width))
    assert Page(html).scripts == html.count("</script>") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", html)
    assert "stu&lt;dent&gt;" in html
    assert "teach&amp;er" in html
    assert facts_of(html)["tokens"][1][0] == label(HOSTILE[:width])
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=\"(?!#)|https?://|@import|url\(", html)


def test_page_has_details_of_each_token() -> None:
    html = render_html(make_view("12 34"))
    facts = facts_of(html)
    assert facts["tokens"][0] == ["<s>", "unlabelled", None, None, []]
    assert facts["tokens"][2] == ["34", "dropped", 1.5, 2.5, [["3", 1.5], ["4", 2.0]]]
    assert facts["tokens"][3][:2] == ["</s>", "unmapped"]
    assert facts["scale"] == 2.5
    shown = [token["class"].split()[1] for token in Page(html).tokens]
    assert shown == ["unlabelled", "kept", "dropped", "unmapped"]


def test_page_stays_readable_json() -> None:
    token = TokenView("a", 0, 1, "kept", True, float("inf"), 1.0)
    view = replace(VIEW, texts=(TextView("a", 0, 0, 0, (token,)),))
    assert facts_of(render_html(view))["tokens"][0][2] is None


def test_page_names_no_path_of_the_machine(tmp_path: Path) -> None:
    student, store = tmp_path / "runs" / "mine", tmp_path / "store"
    names = {"student": str(student), "teacher": f"{store} and Qwen/Qwen2.5-Math-7B"}
    html = render_html(replace(make_view("abc"), **names))
    assert str(tmp_path) not in html
    assert "<code>mine</code>, guided by <code>store and Qwen/Qwen2.5-Math-7B</code>" in html


# The terminal


def test_terminal_marks_tokens_with_brackets() -> None:
    out = render_text(make_view("Anna\nhas 12"))
    assert "\x1b" not in out
    assert "(<s>)[Ann]a↵\nh[as ]12{</s>}" in out


def test_terminal_is_not_driven_by_the_text() -> None:
    out = render_text(make_view("a\x1b[2Jb\u202ec\rd\u009be", width=1))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "␛" in out


def test_later_parts_of_a_character_are_rings() -> None:
    tokens = tuple(TokenView("🧮" * (not n), 0, 1, "kept", True, 1.0, 1.0) for n in range(4))
    view = replace(VIEW, texts=(TextView("🧮", 0, 0, 0, tokens),))
    assert [token_label(token) for token in view.tokens] == ["🧮", "◦", "◦", "◦"]
    page = Page(render_html(view))
    assert "".join(token["text"] for token in page.tokens) == "🧮"
    assert ["part" in token["class"].split() for token in page.tokens] == [False, True, True, True]


def test_weights_by_acceptance_are_shades_and_numbers() -> None:
    tokens = (
        TokenView("a", 0, 1, "kept", 0.75, 3.0, 1.0),
        TokenView("b", 1, 2, "dropped", 0.125, 1.0, 2.0),
        TokenView("<s>", 0, 0, "unlabelled", 0.0, None, None),
    )
    view = replace(VIEW, texts=(TextView("ab", 0, 0, 0, tokens),))
    assert "style=" not in render_html(view)
    html = render_html(replace(view, method=Method(selection="accept")))
    assert re.findall(r'style="--weight: (\d+)%"', html) == ["75", "12"]
    facts = json.loads(re.search(r'id="facts"[^>]*>(.*?)</script>', html)[1])  # type: ignore[index]
    assert [fact[5] for fact in facts["tokens"]] == [0.75, 0.12, 0.0]


def test_summary_averages_known_losses() -> None:
    tokens = (
        TokenView("a", 0, 1, "kept", True, 3.0, 1.0),
        TokenView("b", 1, 2, "dropped", False, 1.0, 2.0),
        TokenView("</s>", 2, 2, "unmapped", True, 5.0, None),
    )
    out = render_text(replace(VIEW, texts=(TextView("ab", 0, 0, 0, tokens),)))
    lines = [line.strip("|").split("|") for line in out.splitlines() if "%)" in line]
    rows = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}
    assert rows["all"] == ["3 (100%)", "2", "3.00", "1.50", "+0.50"]
    assert rows["unmapped"] == ["1 (33%)", "1", "5.00", "\u2013", "\u2013"]


def test_view_without_a_label_is_rendered() -> None:
    token = TokenView("<s>", 0, 0, "unlabelled", False, None, None)
    view = replace(VIEW, texts=(TextView("", 0, 0, 0, (token,)),))
    assert "0 (0%)" in render_text(view)
    # The script divides by the scale of the bars.
    assert facts_of(render_html(view))["scale"] == 1.0
