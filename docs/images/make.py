"""Make the pictures of the README and the site, light and dark.

    python -m docs.images.make                       # all but the photograph, in 20 s on a CPU core
    python -m docs.images.make --only bars           # from benchmarks/experiments/demo.json
    VOCAGNOLM_TEST_MODELS=DIR python -m docs.images.make --only photograph

The last one makes inspect.png. It needs Chromium, and in DIR the directories smollm2-135m and
qwen2.5-coder-1.5b.

alignment-*.svg and strip-*.svg show what the demo's first student, which has read questions but no
answer, and the demo's teacher make of a page with a wrong solution. bars-*.svg, terminal-*.svg and
wrong-*.svg are results of `vocagnolm demo`; acceptance-*.svg, weights-*.svg and real-*.svg of
`benchmarks.experiments`.
gpus-*.svg and store-*.svg are computed, from the formulas of the plan and of the logged MFU.
rules-*.svg is the decision tree of docs/results.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib as mpl
import torch
from transformers import AutoModelForCausalLM

from benchmarks.experiments import plots, real_results
from benchmarks.generated import TOKEN_RATIO
from benchmarks.models import make_config
from vocagnolm.demo.main import results_table
from vocagnolm.demo.methods import METHODS, TEACHER
from vocagnolm.demo.run import BASE, make_base
from vocagnolm.demo.world import write_jsonl
from vocagnolm.models.cost import (
    GATHERED,
    Layout,
    Sizes,
    model_work,
    sizes_of,
    student_memory,
    teacher_memory,
)
from vocagnolm.report import inspect
from vocagnolm.report.plots import add_legend, new_plot, series_style
from vocagnolm.report.view import TokenView
from vocagnolm.shell.io import ASSETS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEMO = "vocagnolm demo --seeds 0 1 2 3 --methods all"
# What `vocagnolm demo --wrong_share SHARE` wrote, by the share.
RESULTS = ROOT / "benchmarks/experiments/demo.json"
SHARE = "0.4"  # the demo's own
QUESTION = "Q: Zoe fills 4 bags. Each one holds 12 shells. How many shells does Zoe need?\nA:"
WRONG = " 4 + 12 = 47. #### 47"
WRONG_PAGE = (
    "Home | Login | Archive | Reply\nQ: Zoe fills 4 bags. Each one holds 9 shells. How many shells"
    " does Zoe need?\nA: 4 + 9 = 32. #### 32\nPosted by eli6157 on 1992-10-01 at 07:08"
)
# The first problem of GSM8K's training split, with its solution and with a wrong one.
PROBLEM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?\n"
    "Natalia sold 48/2 = {0} clips in May.\n"
    "Natalia sold 48+{0} = {1} clips altogether in April and May.\nThe answer is {1}."
)
RESULTS_OF_PROBLEM = ((24, 72), (26, 85))
SHOWN = "6"  # the token whose details are open: of the first wrong result
WIDTH, HEIGHT = 1200, 1130

# Colours of a theme; a colour is never the only sign.
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#656d76", "line": "#c4ccd4", "cool": "9,105,218",
              "warm": "207,88,0"},
    "dark": {"ink": "#e6edf3", "faint": "#9198a1", "line": "#4b535d", "cool": "88,166,255",
             "warm": "255,150,70"},
}  # fmt: skip
# Series of plots, as they can be read on a dark page.
LIGHTER = {
    "#1f5fbf": "#58a6ff",
    "#d2691e": "#ff9646",
    "#1b7f4d": "#3fb97a",
    "#8e44ad": "#b783d8",
    "#0e7490": "#39b3cf",
    "#b5267b": "#e35fa8",
    "#475569": "#9198a1",
}
Theme = dict[str, str]
PICTURES = (
    *("alignment", "strip", "bars", "terminal", "wrong", "acceptance", "weights"),
    *("real", "real-answers", "rules", "gpus", "store"),
    "photograph",
)
# The paper's run: tokens, packed sequences of a micro-batch, and the share that is selected.
RUN_TOKENS, ROWS, ROW_TOKENS, TOP_K = 15e9, 8, 2048, 0.4
# An H100: FLOP/s of 16 bits and GiB; the share of them that a student and a teacher are to reach.
H100_FLOPS, H100_GIB, STUDENT_MFU, TEACHER_MFU = 989e12, 79.6, 0.4, 0.6
GPUS = (1, 2, 4, 8, 16, 32, 64)
MACHINE = 8
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
SANS = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"


def main() -> None:
    """Make what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PICTURES, nargs="+")
    chosen = parser.parse_args().only or [*PICTURES[:-1]]
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        if {"alignment", "strip"} & {*chosen}:
            make_base(scratch, 0)
        if {"alignment", "strip"} & {*chosen}:
            tokens = look(scratch, QUESTION + WRONG)
            answer = [each for each in tokens if each.start >= len(QUESTION)]
            draw("alignment", lambda theme: alignment(answer, theme))
            page = look(scratch, WRONG_PAGE)
            draw("strip", lambda theme: strip(page, theme))
        if "bars" in chosen:
            draw("bars", lambda theme: bars(json.loads(RESULTS.read_text())[SHARE], theme))
        if "terminal" in chosen:
            draw("terminal", lambda theme: terminal(json.loads(RESULTS.read_text())[SHARE], theme))
        if "rules" in chosen:
            draw("rules", rules)
        plotted: dict[str, Callable[[], Any]] = {
            "wrong": wrong,
            "acceptance": lambda: plots.draw_evidence(plots.Results()),
            "weights": lambda: plots.draw_weights(plots.Results()),
            "real": lambda: real_results.draw_rules(real_results.picked()),
            "real-answers": real_results.draw_answers,
            "gpus": gpus,
            "store": store,
        }
        for name, plot in plotted.items():
            if name in chosen:
                draw(name, partial(themed, plot))
        if "photograph" in chosen:
            photograph(scratch)


def draw(name: str, picture: Callable[[Theme], str]) -> None:
    """Write a picture in every theme."""
    for theme, colours in THEMES.items():
        (HERE / f"{name}-{theme}.svg").write_text(picture(colours) + "\n", encoding="utf-8")


def themed(plot: Callable[[], Any], theme: Theme) -> str:
    """Draw a figure of matplotlib in the colours of a theme, as text."""
    ink = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), theme["ink"])
    ink |= dict.fromkeys(("xtick.color", "ytick.color"), theme["ink"])
    style = {"svg.hashsalt": "vocagnolm", "grid.color": theme["line"], **ink}
    style |= {"axes.facecolor": "none", "figure.facecolor": "none", "font.size": 9}
    file = io.StringIO()
    with mpl.rc_context(style):
        plot().savefig(file, format="svg", metadata={"Date": None})
    drawn = file.getvalue()
    if theme is THEMES["dark"]:
        for dark, lighter in LIGHTER.items():
            drawn = drawn.replace(dark, lighter)
    # Trailing blanks are no part of it.
    return "\n".join(line.rstrip() for line in drawn[drawn.index("<svg") :].splitlines())


def look(scratch: Path, text: str) -> list[TokenView]:
    """Return the tokens of a text, with the losses of both models."""
    models = ["--student", str(scratch / BASE), "--teacher", str(ASSETS / TEACHER)]
    (found,) = inspect.build_view(inspect._parse(["--text", text, *models])).texts
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


def terminal(results: dict[str, dict[str, list[float]]], theme: Theme) -> str:
    """Draw what the whole demo prints: the runs of the first seed, and the table."""
    lines = [f"$ {DEMO}", "logs: .../runs/demo/seed*/train.log"]
    for method, values in results.items():
        found = (f"{name} {each[0]:.3f}" for name, each in values.items() if name != "seconds")
        lines.append(f"seed 0  {method:9}  {', '.join(found)}")
    lines += ["...", "", *results_table(results).splitlines()]
    high, left, letter = 19.0, 16.0, 8.0

    def parts() -> Iterator[str]:
        yield box(1, 1, width - 2, height - 2, f'fill="none" stroke="{theme["line"]}"')
        for row, line in enumerate(lines):
            font = f'font-family="{MONO}" font-size="13" xml:space="preserve"'
            fit = f'{font} textLength="{letter * len(line):.0f}"' if line else font
            colour = f"rgb({theme['cool']})" if row == 0 else theme["ink"]
            yield text(left, 26 + row * high, line, colour, fit)

    width = 2 * left + letter * max(map(len, lines))
    height = 26 + len(lines) * high
    return svg(width, height, f"What {DEMO} prints", parts())


def wrong() -> Any:
    """Draw what guidance wins over plain pretraining, by the share of wrong pages."""
    found = json.loads(RESULTS.read_text())
    figure, (axes,) = new_plot(6, 3)
    handles = {}
    shares = sorted(found, key=float)
    for index, method in enumerate(("vocagnolm", "share", "accept")):
        means, x = [], []
        look = series_style(index)
        for share in shares:
            runs = [found[share][name]["accuracy"] for name in (method, "cpt")]
            gains = [one - plain for one, plain in zip(*runs, strict=True)]
            place = 100 * float(share) + (index - 1)
            dots = look | {"linestyle": "", "markersize": 4, "alpha": 0.5}
            axes.plot([place] * len(gains), gains, **dots)
            means.append(statistics.mean(gains))
            x.append(place)
        label = METHODS[method][0]
        (handles[label],) = axes.plot(x, means, **look)
    axes.axhline(0, color=mpl.rcParams["axes.edgecolor"], linewidth=0.8)
    axes.set_xticks([100 * float(share) for share in shares])
    axes.set_xlabel("pages with a wrong solution, in %; small marks are seeds, lines their mean")
    axes.set_ylabel("accuracy less plain")
    axes.grid(axis="y", linewidth=0.3)
    add_legend(figure, handles)
    return figure


def gpus() -> Any:
    """Draw the time of the paper's run and the memory of a GPU against the number of GPUs."""
    figure, (times, memory) = new_plot(7, 3.2, columns=2)
    student, teacher = true_models()
    of_student, of_teacher = seconds_of_a_token(student, teacher)
    plans = {
        "teacher online": of_student + of_teacher,
        "from a store": of_student,
        "scoring": of_teacher,
    }
    handles = {}
    for index, (name, seconds) in enumerate(plans.items()):
        hours = [RUN_TOKENS * seconds / 3600 / count for count in GPUS]
        (handles[name],) = times.plot(GPUS, hours, markersize=4, **series_style(index))
    times.set_yscale("log", base=2)
    times.set_ylabel("hours of 15 billion tokens")
    sizes = [sizes_of(model) for model in (student, teacher)]
    for index, (name, gib) in enumerate(memory_of_gpus(*sizes).items(), len(plans)):
        (handles[name],) = memory.plot([*gib], [*gib.values()], markersize=4, **series_style(index))
    memory.axhline(H100_GIB, color=mpl.rcParams["axes.edgecolor"], linewidth=0.8)
    memory.text(1, H100_GIB + 1, "an H100 has", fontsize=8)
    memory.set_ylim(0, 90)
    memory.set_ylabel("GiB of a GPU")
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(GPUS, [str(count) for count in GPUS])
        axes.set_xlabel("GPUs")
        axes.grid(linewidth=0.3)
    times.yaxis.set_major_formatter("{x:.0f}")
    add_legend(figure, handles)
    return figure


def true_models() -> list[Any]:
    """TinyLlama 1.1B and Qwen2.5-Math-7B, without weights."""
    models = []
    for role in ("student", "teacher"):
        with torch.device("meta"):
            config = make_config(role, "full")  # type: ignore[arg-type]
            models.append(AutoModelForCausalLM.from_config(config))
    return models


def seconds_of_a_token(student: Any, teacher: Any, selected: float = TOP_K) -> tuple[float, float]:
    """Seconds of a GPU for a token of the student's: of the student's step, and the teacher's."""
    keys = ROW_TOKENS / 2
    training = model_work(student).training_flops(1, keys, selected)
    forward = model_work(teacher).forward_flops(1, keys, 1) * TOKEN_RATIO
    return training / (H100_FLOPS * STUDENT_MFU), forward / (H100_FLOPS * TEACHER_MFU)


def memory_of_gpus(student: Sizes, teacher: Sizes) -> dict[str, dict[int, float]]:
    """GiB of a GPU by their number, as `--dry_run` plans them."""
    tokens, found = ROWS * ROW_TOKENS, {}
    for name in ("DDP", "FSDP2", "FSDP2, --teacher_sharding node"):
        found[name] = {}
        for count in GPUS:
            layout = Layout(count, None, "mixed", accumulates=True)
            if name != "DDP" and count > 1:
                layout = Layout(count, count, "16 bits", accumulates=True)
            devices = min(count, MACHINE) if name.endswith("node") else 1
            parts = student_memory(student, layout, tokens)
            held = teacher_memory(teacher, 2, None, devices)
            # It is dropped before the student's pass.
            passing = parts["activations"] + parts["output head"]
            held[GATHERED] = max(0, held.get(GATHERED, 0) - passing)
            found[name][count] = (sum(parts.values()) + sum(held.values())) / 2**30
    return found


def store() -> Any:
    """Draw the cost of several runs with an online teacher and from a store, by FLOPs alone."""
    models = true_models()
    guided, teacher = seconds_of_a_token(*models)
    plain, _ = seconds_of_a_token(*models, selected=1)
    figure, (axes,) = new_plot(6, 3)
    runs = range(1, 7)
    lines = {
        "online: teacher in every run": [count * (guided + teacher) / plain for count in runs],
        "from a store: scored once": [(teacher + count * guided) / plain for count in runs],
        "plain pretraining": [*runs],
    }
    handles = {}
    for index, (name, costs) in enumerate(lines.items()):
        (handles[name],) = axes.plot(runs, costs, **series_style(index))
    axes.set_ylim(0)
    axes.set_xlabel("runs on the same corpus")
    axes.set_ylabel("cost, in plain runs")
    axes.grid(linewidth=0.3)
    add_legend(figure, handles)
    return figure


def rules(theme: Theme) -> str:
    """Draw what to begin with."""
    questions = (
        ("Is training on the good rows alone no better than on all?", "plain training",
         "--method cpt"),
        ("Are many short answers wrong, and does the teacher know?",
         "the rows with the lowest teacher loss", "rank --by teacher --keep"),
        ("Have you a good model with the student's tokenizer?", "acceptance by it",
         "--method rho1 --selection accept"),
    )  # fmt: skip
    wide, high, right, step = 300.0, 46.0, 372.0, 86.0

    def parts() -> Iterator[str]:
        line = f'stroke="{theme["faint"]}" stroke-width="1.5" fill="none"'
        cool = f'fill="rgba({theme["cool"]},.16)" stroke="rgb({theme["cool"]})"'
        for row, (question, rule, options) in enumerate(questions):
            y = 4 + row * step
            yield box(2, y, wide, high, f'{line} stroke-dasharray="5 3"')
            first, second = halves(question)
            middle = 'text-anchor="middle" font-size="14"'
            yield text(2 + wide / 2, y + 19, first, theme["ink"], middle)
            yield text(2 + wide / 2, y + 37, second, theme["ink"], middle)
            yield f'<path d="M{wide + 2} {y + high / 2}H{right}" {line}/>'
            yield text(wide + 22, y + high / 2 - 6, "yes", theme["faint"], 'font-size="13"')
            yield from answer(right, y, rule, options, cool)
            yield f'<path d="M{2 + wide / 2} {y + high}V{y + step}" {line}/>'
            yield text(2 + wide / 2 + 8, y + high + 25, "no", theme["faint"], 'font-size="13"')
        yield from answer(2, 4 + 3 * step, "acceptance", "--selection accept", cool)

    def answer(x: float, y: float, rule: str, options: str, paint: str) -> Iterator[str]:
        yield box(x, y, wide, high, paint)
        middle = 'text-anchor="middle" font-size="14"'
        yield text(x + wide / 2, y + 19, rule, theme["ink"], middle)
        mono = f'text-anchor="middle" font-size="13" font-family="{MONO}"'
        yield text(x + wide / 2, y + 37, options, theme["ink"], mono)

    title = "What to begin with"
    return svg(right + wide + 2, 8 + 3 * step + high, title, parts())


def halves(question: str) -> tuple[str, str]:
    """Break a line near its middle."""
    words = question.split()
    count = next(n for n in range(len(words)) if len(" ".join(words[:n])) >= len(question) / 2 - 3)
    return " ".join(words[:count]), " ".join(words[count:])


def photograph(scratch: Path) -> None:
    """Let Chromium draw the guidance of a right and a wrong page, as inspect.png."""
    models = Path(os.environ["VOCAGNOLM_TEST_MODELS"])
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("docs/images: Chromium is needed, found none: install it")
    pages = scratch / "pages.jsonl"
    write_jsonl(pages, (PROBLEM.format(*results) for results in RESULTS_OF_PROBLEM))
    status = inspect.main(
        [
            *("--dataset", str(pages), "--document", "0", "1", "--selection", "accept"),
            *("--student", str(models / "smollm2-135m")),
            *("--teacher", str(models / "qwen2.5-coder-1.5b")),
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
