"""Make the pictures of the README and the site, light and dark.

    python docs/images/make.py                       # all but the photograph, in 15 s on a CPU core
    python docs/images/make.py --only bars           # from benchmarks/experiments/demo.json
    python docs/images/make.py --only photograph     # inspect.png, which needs Chromium

alignment-*.svg and strip-*.svg show what the demo's first student, which has read questions but no
answer, and the demo's teacher make of a page with a wrong solution. bars-*.svg are the results of
`vocagnolm demo`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from vocagnolm.demo.main import METHODS
from vocagnolm.demo.run import BASE, TEACHER, make_base
from vocagnolm.demo.world import write_jsonl
from vocagnolm.io import ASSETS
from vocagnolm.report import inspect
from vocagnolm.report.view import TokenView

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks/experiments/demo.json"
QUESTION = "Q: Zoe fills 4 bags. Each one holds 12 shells. How many shells does Zoe need?\nA:"
WRONG = " 4 + 12 = 47. #### 47"
PAGE = (
    "Home | Login | Archive | Reply\nQ: Zoe fills 4 bags. Each one holds 9 shells. How many shells"
    " does Zoe need?\nA: {}\nPosted by eli6157 on 1992-10-01 at 07:08"
)
SOLUTIONS = ("4 * 9 = 36. #### 36", "4 + 9 = 32. #### 32")
SHOWN = "␣32"  # the token whose details are open: the wrong result
WIDTH, HEIGHT = 1200, 1060

# Colours of a theme; a colour is never the only sign.
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#656d76", "line": "#c4ccd4", "cool": "9,105,218",
              "warm": "207,88,0"},
    "dark": {"ink": "#e6edf3", "faint": "#9198a1", "line": "#4b535d", "cool": "88,166,255",
             "warm": "255,150,70"},
}  # fmt: skip
Theme = dict[str, str]
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


def main() -> None:
    """Make what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("alignment", "strip", "bars", "photograph"), nargs="+")
    chosen = parser.parse_args().only or ["alignment", "strip", "bars"]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        if {"alignment", "strip", "photograph"} & {*chosen}:
            make_base(scratch, 0)
        if {"alignment", "strip"} & {*chosen}:
            tokens = look(scratch, QUESTION + WRONG)
            answer = [each for each in tokens if each.start >= len(QUESTION)]
            draw("alignment", lambda theme: alignment(answer, theme))
            page = look(scratch, PAGE.format(SOLUTIONS[1]))
            draw("strip", lambda theme: strip(page, theme))
        if "bars" in chosen:
            draw("bars", lambda theme: bars(json.loads(RESULTS.read_text()), theme))
        if "photograph" in chosen:
            photograph(scratch)


def draw(name: str, picture: Callable[[Theme], str]) -> None:
    """Write a picture in every theme."""
    for theme, colours in THEMES.items():
        (HERE / f"{name}-{theme}.svg").write_text(picture(colours) + "\n", encoding="utf-8")


def look(scratch: Path, text: str) -> list[TokenView]:
    """Return the tokens of a text, with the losses of both models."""
    models = ["--student", str(scratch / BASE), "--teacher", str(ASSETS / TEACHER)]
    (found,) = inspect.look(inspect._parse(["--text", text, *models])).texts
    return [*found.tokens]


def svg(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    """Wrap the parts of a picture."""
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{SANS}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"])


def text(x: float, y: float, shown: str, fill: str, more: str = "") -> str:
    """Write a line of text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" {more}>{escape(shown)}</text>'


def box(x: float, y: float, wide: float, high: float, paint: str) -> str:
    """Draw a box with round corners."""
    size = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}"'
    return f'<rect {size} rx="4" {paint}/>'


def visible(shown: str) -> str:
    """Make blanks and line breaks visible."""
    return shown.replace(" ", "␣").replace("\n", "↵")


def alignment(tokens: list[TokenView], theme: Theme) -> str:
    """Draw student tokens over the teacher tokens that cover them, with both losses."""
    unit, gap, left = 13.0, 16.0, 96.0  # a character, between two tokens, before the first
    centred = f'text-anchor="middle" font-family="{MONO}" font-size="15"'
    small = 'text-anchor="middle" font-size="12.5"'

    def parts() -> Iterator[str]:
        names = ((21, "student"), (91, "teacher"), (128, "student's loss"), (148, "teacher's loss"))
        for y, row in names:
            yield text(0, y, row, theme["faint"], 'font-size="13"')
        x = left
        for token in tokens:
            pieces = token.pieces
            wide = width_of(token)
            kept = token.status == "kept"
            fill = f"rgba({theme['cool']},.22)" if kept else "none"
            edge = f"rgb({theme['cool']})" if kept else theme["line"]
            dash = ' stroke-dasharray="4 3"' if token.status == "unmapped" else ""
            yield box(x, 2, wide, 28, f'fill="{fill}" stroke="{edge}" stroke-width="1.5"{dash}')
            name = token.text if token.is_special else visible(token.text)
            yield text(x + wide / 2, 21, name, theme["ink"], centred)
            each = wide / max(len(pieces), 1)
            for index, (piece, _) in enumerate(pieces):
                at = x + index * each
                yield f'<path d="M{x + wide / 2:.1f} 30L{at + each / 2:.1f} 72" stroke="{edge}"/>'
                paint = f'fill="none" stroke="{theme["line"]}" stroke-width="1.5"'
                yield box(at + 1.5, 72, each - 3, 28, paint)
                yield text(at + each / 2, 91, visible(piece), theme["ink"], centred)
            for y, loss in ((128, token.student_loss_nats), (148, token.teacher_loss_nats)):
                shown = "-" if loss is None else f"{loss:.1f}"
                yield text(x + wide / 2, y, shown, theme["ink"], small)
            colour = f"rgb({theme['cool']})" if kept else theme["faint"]
            shown = {"kept": "train", "dropped": "drop", "unmapped": "train"}[token.status]
            yield text(x + wide / 2, 172, shown, colour, small)
            x += wide + gap

    def width_of(token: TokenView) -> float:
        letters = max(len(token.text), sum(max(len(piece), 2) for piece, _ in token.pieces))
        return max(unit * letters, 40)

    width = left + sum(width_of(token) + gap for token in tokens) - gap + 2
    title = "Each student token, the teacher tokens that cover it, both losses, and what is trained"
    return svg(width, 184, title, parts())


def strip(tokens: list[TokenView], theme: Theme) -> str:
    """Draw a text on the colour of its excess: blue where the student lags, orange elsewhere."""
    unit, high, left = 9.6, 34.0, 4.0
    font = f'font-family="{MONO}" font-size="16" xml:space="preserve"'
    strongest = 8.0  # nats
    widths = []

    def parts() -> Iterator[str]:
        x, y = left, 8.0
        for token in tokens:
            if token.is_special:
                continue
            letters = token.text.replace("\n", "")
            if x == left:
                letters = letters.lstrip()
            wide = unit * len(letters)
            excess = token.excess_nats or 0.0
            colour = theme["cool"] if excess > 0 else theme["warm"]
            shade = f"rgba({colour},{min(abs(excess) / strongest, 1) * 0.75:.2f})"
            if letters:
                yield box(x, y, wide, 25, f'fill="{shade}"')
                fit = f'{font} textLength="{wide:.1f}"'
                yield text(x, y + 18, letters, theme["ink"], fit)
            if token.status == "kept" and letters:
                line = f'stroke="rgb({theme["cool"]})" stroke-width="2"'
                yield f'<path d="M{x + 1:.1f} {y + 26:.0f}h{wide - 2:.1f}" {line}/>'
            x += wide
            widths.append(x)
            if "\n" in token.text or (x > 560 and not token.text.endswith(":")):
                x, y = left, y + high
        y += high + 18
        for at, colour, shown in (
            (0, "cool", "the student lags: worth training"),
            (270, "warm", "the teacher doubts it"),
        ):
            yield box(left + at, y - 11, 14, 14, f'fill="rgba({theme[colour]},.6)"')
            yield text(left + at + 21, y, shown, theme["faint"], 'font-size="13"')
        line = f'stroke="rgb({theme["cool"]})" stroke-width="2"'
        yield f'<path d="M{left + 450} {y - 4}h18" {line}/>'
        yield text(left + 475, y, "kept", theme["faint"], 'font-size="13"')

    drawn = [*parts()]
    title = "A page with a wrong solution, shaded by the excess of the student's loss"
    return svg(max(*widths, 520) + 8, _lowest(drawn) + 12, title, iter(drawn))


def _lowest(drawn: list[str]) -> float:
    """Return the last line's place."""
    return float(drawn[-1].split('y="')[1].split('"')[0])


def bars(results: dict[str, dict[str, list[float]]], theme: Theme) -> str:
    """Draw the accuracy of each method: mean, standard deviation, and every seed."""
    left, full, high = 190.0, 380.0, 40.0

    def parts() -> Iterator[str]:
        for row, (method, values) in enumerate(results.items()):
            found = values["accuracy"]
            mean, deviation = statistics.mean(found), statistics.stdev(found)
            y, colour = (
                10 + row * high,
                theme["cool" if "vocagnolm" in METHODS[method][1] else "warm"],
            )
            label = METHODS[method][0]
            right = 'text-anchor="end" font-size="14"'
            yield text(left - 12, y + 18, label, theme["ink"], right)
            yield box(left, y + 2, full * mean, 22, f'fill="rgba({colour},.55)"')
            ink = theme["ink"]
            for one in found:
                place = f'cx="{left + full * one:.1f}" cy="{y + 13}" r="3"'
                yield f'<circle {place} fill="{ink}" fill-opacity=".55"/>'
            first, last = (left + full * min(mean + sign * deviation, 1) for sign in (-1, 1))
            yield f'<path d="M{first:.1f} {y + 13}H{last:.1f}" stroke="{ink}" stroke-width="1.5"/>'
            shown = f"{mean:.3f} ± {deviation:.3f}"
            yield text(left + full + 14, y + 18, shown, theme["ink"], 'font-size="14"')
        y = 10 + len(results) * high + 12
        yield f'<path d="M{left} 6V{y - 8}" stroke="{theme["line"]}"/>'
        about = (
            "share of 400 held-out problems answered right;"
            " dots are seeds, lines one standard deviation"
        )
        yield text(2, y + 8, about, theme["faint"], 'font-size="12.5"')

    title = "Accuracy of the demo's methods"
    return svg(left + full + 130, 10 + len(results) * high + 30, title, parts())


def photograph(scratch: Path) -> None:
    """Let Chromium draw the guidance of a right and a wrong page, as inspect.png."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/images: Chromium is needed, found none: install it")
    pages = scratch / "pages.jsonl"
    write_jsonl(pages, (PAGE.format(solution) for solution in SOLUTIONS))
    status = inspect.main(
        [
            *("--dataset", str(pages), "--document", *map(str, range(len(SOLUTIONS)))),
            *("--student", str(scratch / BASE), "--teacher", str(ASSETS / TEACHER)),
            *("--output_dir", str(scratch)),
        ]
    )
    if status:
        sys.exit(status)
    page = scratch / inspect.PAGE
    facts = page.read_text().split('<script id="facts" type="application/json">')[1]
    names = [name for name, *_ in json.loads(facts.split("</script>")[0])["tokens"]]
    address = f"{page.as_uri()}#t{names.index(SHOWN)}"
    command = [browser, "--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars"]
    command += [f"--user-data-dir={scratch / 'profile'}", f"--window-size={WIDTH},{HEIGHT}"]
    image = HERE / "inspect.png"
    command += ["--force-device-scale-factor=1.5", f"--screenshot={image}", address]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    main()
