"""The guidance view in a terminal, as a page, and in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import DARK, FLAGS, find_browser, look, read_dom

from vocagnolm.objective import Method
from vocagnolm.report.page import (
    invisible_name,
    label,
    labelled_tokens,
    render_html,
    render_table,
    render_text,
    write_view,
)
from vocagnolm.report.view import (
    GuidanceView,
    PieceView,
    Status,
    TextView,
    TokenView,
    ViewSettings,
    read_views,
)

SETTINGS = ViewSettings("stu<dent>", "teach&er", Method(), "each text")
HOSTILE = (
    "<script>alert('1')</script>\"&amp;' \x1b[31m\x00\r\n\u05e9\u05dc\u05d5\u05dd \u202eabc\u200b\t"
    "</script><!-- {{facts}} \u2028 🧮 é"
)


def make_view(*texts: str, width: int = 3, settings: ViewSettings = SETTINGS) -> GuidanceView:
    """Texts cut into tokens of so many characters; a piece for each character of a token."""
    return GuidanceView(settings, tuple(make_text(text, width) for text in texts))


def make_text(text: str, width: int) -> TextView:
    tokens = [TokenView("<s>", 0, 0, "unlabelled", False, None, None)]
    for number, start in enumerate(range(0, len(text), width)):
        end = min(start + width, len(text))
        pieces = tuple(PieceView(text[i], i, i + 1, i / 2) for i in range(start, end))
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
        elif found.get("role") == "option":
            self.tokens.append(found | {"text": ""})
            self._depth = 1

    def handle_endtag(self, tag: str) -> None:
        self._depth -= bool(self._depth) and tag in ("b", "i", "span")

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.tokens[-1]["text"] += data


def visible(text: str) -> str:
    return "".join(invisible_name(character) or character for character in text)


def facts_of(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="facts" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_shows_every_character_once_in_order() -> None:
    html = render_html(make_view(HOSTILE, "b"))
    page = Page(html)
    inside = [token for token in page.tokens if "special" not in token["class"]]
    assert "".join(token["text"] for token in inside) == visible(HOSTILE) + "b"
    assert [token["id"] for token in page.tokens] == [f"t{n}" for n in range(len(page.tokens))]


@pytest.mark.parametrize("width", [3, 100])
def test_page_keeps_its_own_elements_only(width: int) -> None:
    html = render_html(make_view(HOSTILE, width=width))
    assert Page(html).scripts == Page(render_html(make_view("plain"))).scripts == 2
    assert html.count("</script>") == 2
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", html)
    assert "stu&lt;dent&gt;" in html
    assert "teach&amp;er" in html
    assert facts_of(html)["tokens"][1][0] == label(HOSTILE[:width])


def test_page_loads_nothing_when_opened() -> None:
    html = render_html(make_view("x = 1"))
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=|https?://|@import|url\(", html)


def test_page_tells_status_and_losses_when_read_aloud() -> None:
    tokens = Page(render_html(make_view("12 34"))).tokens
    assert tokens[0]["aria-label"] == "<s>, unlabelled"
    assert tokens[1]["aria-label"] == "12␣, kept, student 1.50 nats, teacher 1.50 nats"
    assert tokens[-1]["aria-label"] == "</s>, unmapped trained, student 0.25 nats"
    assert [token["tabindex"] for token in tokens] == ["0", "-1", "-1", "-1"]
    assert "special" in tokens[-1]["class"].split()


def test_page_has_details_of_each_token() -> None:
    facts = facts_of(render_html(make_view("12 34")))
    assert facts["tokens"][2] == ["34", "dropped", 1.5, 2.5, [["3", 3, 4, 1.5], ["4", 4, 5, 2.0]]]
    assert facts["scale"] == 2.5


def test_page_stays_readable_json() -> None:
    token = TokenView("a", 0, 1, "kept", True, float("inf"), 1.0)
    view = GuidanceView(SETTINGS, (TextView("a", 0, 0, 0, (token,)),))
    assert facts_of(render_html(view))["tokens"][0][2] is None


def test_page_is_small() -> None:
    started = time.perf_counter()
    html = render_html(make_view("The answer is 12. " * 341))
    assert len(Page(html).tokens) == 2048
    assert len(html) < 1_000_000
    assert time.perf_counter() - started < 5


def test_labels_number_the_parts() -> None:
    tokens = tuple(
        TokenView("🧮" * (not number), 0, 1, "kept", True, 1.0, 1.0) for number in range(4)
    )
    text = TextView("🧮", 0, 0, 0, tokens)
    view = GuidanceView(SETTINGS, (text,))
    names = [name for name, *_ in labelled_tokens(view)]
    assert names == [f"🧮 ({number} of 4)" for number in range(1, 5)]
    page = Page(render_html(view))
    assert "".join(token["text"] for token in page.tokens) == "🧮"
    assert ["part" in token["class"].split() for token in page.tokens] == [False, True, True, True]


ENTROPY = Method("rho1", top_k=0.7, rho1_score="loss_and_entropy")


@pytest.mark.parametrize(
    ("method", "key", "expected"),
    [
        (Method(), "kept", "Trained: its excess is among the largest 40 %."),
        (Method("rho1"), "dropped", "Not trained: its excess is not among the largest 40 %."),
        (ENTROPY, "kept", "Trained: its excess is among the largest 70 %, with an entropy of the"),
        (Method("chunk"), "kept", "Trained: its chunk's excess is among the largest 40 %."),
        (Method("chunk", chunk_selection="tokens"), "kept", "Trained: its excess is among the"),
        (Method(unmapped="exclude"), "unmapped", "Not trained; no teacher loss to compare with."),
        (Method(unmapped="mean"), "unmapped trained", "Trained; it competed with the mean teacher"),
    ],
)
def test_reasons_say_what_decided_when_settings_differ(
    method: Method, key: str, expected: str
) -> None:
    html = render_html(make_view("x", settings=replace(SETTINGS, method=method)))
    assert facts_of(html)["reasons"][key].startswith(expected)


def test_page_says_what_is_compared_when_chunks_are() -> None:
    settings = ViewSettings("s", "t", Method("chunk"), "each text", step=100)
    html = render_html(make_view("x", settings=settings))
    assert "max over the teacher tokens of the same chunk" in html
    assert "step 100 · method chunk" in html


def test_files_are_written_whole(tmp_path: Path) -> None:
    view = make_view(HOSTILE)
    write_view(view, tmp_path / "new", "guidance")
    assert read_views(tmp_path / "new" / "guidance.json") == view
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "guidance.html",
        "guidance.json",
    }


# The terminal.


def test_terminal_marks_tokens_with_brackets() -> None:
    out = render_text(make_view("Anna\nhas 12"), color=False)
    assert "\x1b" not in out
    assert "(<s>)[Ann]a↵\nh[as ]12{</s>}" in out


def test_terminal_shows_every_character_once_when_coloured() -> None:
    out = render_text(make_view("Anna\nhas 12"), color=True)
    plain = re.sub("\x1b\\[[0-9;]*m", "", out)
    assert "<s>Anna↵\nhas 12</s>" in plain
    assert "\x1b[1;30;43mAnn\x1b[0m" in out


@pytest.mark.parametrize("render", [lambda v: render_text(v, color=False), render_table])
def test_terminal_is_not_driven_by_the_text(
    render: Callable[[GuidanceView], str],
) -> None:
    out = render(make_view("a\x1b[2Jb\u202ec\rd\u009be", width=1))
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", out)
    assert "␛" in out


def test_table_lists_losses_and_pieces_when_asked() -> None:
    lines = render_table(make_view("12 34")).splitlines()
    assert lines[0].split() == [
        *("#", "token", "status", "student", "teacher", "excess", "teacher", "pieces")
    ]
    cells = re.split(" {2,}", lines[3].strip())
    assert cells == ["2", "34", "dropped", "1.50", "2.50", "\u22121.00", "3 1.50 | 4 2.00"]
    assert "unmapped trained" in lines[4]


def test_columns_line_up_when_characters_are_wide() -> None:
    lines = render_table(make_view("数学和x = 12", width=3)).splitlines()
    at = [line.index(status) for line, status in ((lines[2], "kept"), (lines[3], "dropped"))]
    assert at[0] == at[1] - 3  # three characters of two columns each


def test_summary_counts_by_status_when_all_occur() -> None:
    out = render_text(make_view("123456789"), color=False)
    row = next(line for line in out.splitlines() if line.startswith("kept"))
    assert row.split() == ["kept", "2", "(50%)", "2", "1.50", "3.00", "\u22121.50"]
    assert any(re.match(r"all +4 \(100%\) +3 ", line) for line in out.splitlines())


def test_summary_averages_known_losses() -> None:
    tokens = (
        TokenView("a", 0, 1, "kept", True, 3.0, 1.0),
        TokenView("b", 1, 2, "dropped", False, 1.0, 2.0),
        TokenView("</s>", 2, 2, "unmapped", True, 5.0, None),
    )
    out = render_text(GuidanceView(SETTINGS, (TextView("ab", 0, 0, 0, tokens),)), color=False)
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "%)" in line}
    assert rows["all"] == ["all", "3", "(100%)", "2", "3.00", "1.50", "+0.50"]
    assert rows["unmapped"][3:] == ["1", "5.00", "\u2013", "\u2013"]


# In a browser.


@pytest.fixture
def page_path(tmp_path: Path) -> Path:
    view = make_view("Anna has 12\n" * 12, HOSTILE)
    write_view(view, tmp_path, "guidance")
    return tmp_path / "guidance.html"


@pytest.mark.processes
def test_browser_shows_tokens_and_details(page_path: Path, tmp_path: Path) -> None:
    dom = read_dom(f"{page_path.as_uri()}#t12", tmp_path / "profile")
    page, view = Page(dom), read_views(page_path.with_suffix(".json"))
    assert len(page.tokens) == len(view.tokens)
    for shown, token in zip(page.tokens, view.tokens, strict=True):
        assert token.status in shown["class"].split()
        assert shown["text"] == visible(token.text)
    assert [t["id"] for t in page.tokens if t["aria-selected"] == "true"] == ["t12"]
    assert "chosen" in page.tokens[12]["class"].split()
    assert re.search(r'<div id="hint" hidden=', dom)
    assert re.search(r'<div id="shown">', dom)
    token = view.tokens[12]
    assert f'<p class="name">{label(token.text)}</p>' in dom
    assert f'<div class="value">{token.student_loss_nats:.2f}</div>' in dom
    assert dom.count('<div class="piece"') == len(token.pieces) == 3


_INKS = """(page) => [".kept", ".dropped", ".unlabelled", "body"].map((name) => {
    const style = page.defaultView.getComputedStyle(page.querySelector(name));
    return [style.color, style.backgroundColor];
})"""


@pytest.mark.processes
@pytest.mark.parametrize(("flags", "is_dark"), [((), False), ((DARK,), True)])
def test_browser_shows_a_page_in_light_and_dark(
    page_path: Path, flags: tuple[str, ...], is_dark: bool
) -> None:
    def lightness(color: str) -> float:
        return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3

    kept, *others, (_, ground) = look(page_path, _INKS, 390, *flags)
    assert (lightness(ground) < 60) is is_dark
    assert abs(lightness(kept[0]) - lightness(kept[1])) > 100
    assert all(abs(lightness(ink) - lightness(ground)) > 100 for ink, _ in others)
    assert look(page_path, "(page) => page.documentElement.scrollWidth", 390) <= 390


def test_page_names_no_path_of_the_machine(tmp_path: Path) -> None:
    student, store = tmp_path / "runs" / "mine", tmp_path / "store"
    settings = replace(SETTINGS, student=str(student), teacher=f"{store} and Qwen/Qwen2.5-Math-7B")
    html = render_html(make_view("abc", settings=settings))
    assert str(tmp_path) not in html
    assert "<code>mine</code>, guided by <code>store and Qwen/Qwen2.5-Math-7B</code>" in html


class Driver:
    """A browser under the W3C protocol of its driver."""

    def __init__(self, port: int, browser: str, profile: Path):
        self._base = f"http://127.0.0.1:{port}"
        options = {"binary": browser, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        asked = {"browserName": "chrome", "goog:chromeOptions": options}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._base += f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def evaluate(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def point(self, selector: str) -> None:
        """Move the mouse over an element."""
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": found}
        mouse = {"type": "pointer", "id": "mouse", "actions": [move]}
        self.call("POST", "/actions", {"actions": [mouse]})

    def press(self, key: str) -> None:
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    path = shutil.which("chromedriver")
    if path is None:
        pytest.skip("needs chromedriver")
    process = subprocess.Popen([path, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = (re.search(r"on port (\d+)\.", line) for line in process.stdout)
        port = next(int(found[1]) for found in ports if found)
        opened = Driver(port, find_browser(), tmp_path / "driven")
        yield opened
        opened.call("DELETE", "")
    finally:
        process.terminate()
        process.wait(30)


def test_browser_shows_details(driver: Driver, page_path: Path) -> None:
    name = 'document.querySelector("#shown .name").textContent'
    pieces = 'document.querySelectorAll(".piece").length'
    driver.call("POST", "/url", {"url": page_path.as_uri()})
    assert driver.evaluate('document.getElementById("shown").hidden')
    driver.point("#t3")
    assert driver.evaluate(name) == "as␣"
    assert driver.evaluate('getComputedStyle(document.querySelector("#shown")).display') == "block"
    assert driver.evaluate(pieces) == 3
    driver.evaluate('document.getElementById("t1").focus()')
    driver.press("\ue014")  # the right arrow
    assert driver.evaluate(name) == "a␣h"
    assert driver.evaluate("document.activeElement.id") == "t2"
    # A bar lies under each character of the token, from its left to its right end.
    reach = """(() => {
        const token = document.getElementById("t2").getBoundingClientRect();
        const bars = [...document.querySelectorAll(".piece")].map((x) => x.getBoundingClientRect());
        return bars.every((bar) => bar.left >= token.left - 1 && bar.right <= token.right + 1
            && bar.top > token.top && bar.top < token.bottom + 12);
    })()"""
    assert driver.evaluate(reach)
    driver.press("\ue010")  # End: the last token of the page
    assert driver.evaluate(name) == "</s>"
    assert driver.evaluate(pieces) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the browser's place is known on Linux")
def test_browser_draws_every_teacher_token(driver: Driver, page_path: Path) -> None:
    driver.call("POST", "/url", {"url": page_path.as_uri()})
    count = driver.evaluate("tokens.length")
    assert count > 60
    found = driver.evaluate(
        "tokens.map((token, number) => { pin(number); return ["
        'facts.tokens[number][4].length, document.querySelectorAll(".piece").length]; })'
    )
    assert all(drawn >= pieces - 1 for pieces, drawn in found), found  # a line end may have no box
    assert max(pieces for pieces, _ in found) == 3
