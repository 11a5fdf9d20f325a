"""Compare runs: accuracies, paired tests, curves, settings and costs, on one page.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare --wandb lab/students --output_dir out

Each run is compared with the first one, on the same items. Runs that were asked or graded
differently are not paired. Numbers for only some of the items, or with other prompts or data than
the published ones, are always marked. Exit status: 0 done, 2 a wrong argument or file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from vocagnolm.cli import Parser, shell
from vocagnolm.record import output_directory
from vocagnolm.report.comparison import Comparison, compare, to_json
from vocagnolm.report.evaluations import heading, in_order
from vocagnolm.report.findings import UNDECIDED, difference, findings
from vocagnolm.report.plots import bar_series, draw_bars, draw_curves, read_curves
from vocagnolm.report.render import TEMPLATES
from vocagnolm.report.statistics import RESAMPLES, Pairing
from vocagnolm.report.trainings import differing, setting_text
from vocagnolm.shell.extras import require
from vocagnolm.shell.io import markdown_table, print_main, write_json, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_RECORD = "comparison.json"
# What a reader must know to understand the tables and pictures.
_STAR = "*: may not be compared with a published number; the notes on its run say why."
_ACCURACIES = f"In brackets: the 95 % interval. {_STAR}"
_PAIRINGS = (
    f"Interval: paired bootstrap, {RESAMPLES:,} resamples; too narrow where few items are decided "
    "by one run only. p: McNemar's exact test, two-sided; p (Holm): corrected for the number of "
    "benchmarks. With several outputs per item, a run is right that has more right outputs, and p "
    f"is of the exact sign-flip test over items. {_STAR}"
)
_COSTS = (
    "Tokens/s: the median of the log. FLOPs: of the student and of the teachers that are in the "
    "run; those of scoring a store are not counted."
)
_BARS = (
    "Bars of one run: 95 % interval of its evaluation; of several seeds: their mean and standard "
    f"deviation. Hollow: as reported (arXiv 2503.19123v1). {_STAR}"
)
_CURVES = "Over the seeds of a setting: the mean, and a band from the lowest to the highest."
# A section has a title, the rows of a table with its header first, an explanation, and notes.
_Section = tuple[str, list[list[str]], str, Sequence[str]]


def comparison_markdown(comparison: Comparison) -> str:
    """Write a comparison as findings and tables."""
    parts = []
    bullets = [f"- {finding}" for finding in findings(comparison)]
    if bullets:
        parts.append("\n".join(bullets))
    for title, rows, explanation, notes in _sections(comparison):
        parts += [f"## {title}", markdown_table(rows)]
        if explanation:
            parts.append(explanation)
        if notes:
            parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts) + "\n"


def _sections(comparison: Comparison) -> list[_Section]:
    """Return the tables that have rows, in the order of the page."""
    # One run stands for its setting. The others differ from it only in their seed.
    runs = [runs[0] for runs in comparison.settings.values()]
    options = [["option"] + list(comparison.settings)]
    for name in differing(runs):
        options.append([name] + [setting_text(run.options.get(name)) for run in runs])
    sections = [_accuracies(comparison)]
    sections += _pairings(comparison)
    sections.append(("Settings that differ", options, "", []))
    sections.append(_costs(comparison))
    # Leave out a table that has only a header.
    return [section for section in sections if len(section[1]) > 1]


def _accuracies(comparison: Comparison) -> _Section:
    """Return a table of the accuracies of all evaluations, with the paper's below them."""
    notes = []
    # {(run, its prompts): {column: cell}}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for evaluation in comparison.evaluations:
        cells: dict[str, str] = {}
        for score in evaluation.scores:
            star = "*" if score["marked"] else ""
            interval = f"{score['low']:.1f} to {score['high']:.1f}"
            cells[score["column"]] = f"{score['rounded']:.1f}{star} ({interval})"
        lines[evaluation.label, evaluation.prompts] = cells
        notes.append(f"{evaluation.label}: {evaluation.model}; {'; '.join(evaluation.notes)}")
    # Reported rows follow those of the runs, in the same columns.
    for cell in comparison.reported:
        line = f"reported: {cell['row']} ({cell['table']})", "paper"
        lines.setdefault(line, {})[cell["column"]] = f"{cell['reported']:.1f}"
    named_columns: list[str] = []
    for cells in lines.values():
        named_columns += cells
    columns = in_order(named_columns)
    rows = [["run", "prompts"] + [heading(column) for column in columns]]
    for (label, prompts), cells in lines.items():
        rows.append([label, prompts] + [cells.get(column, "-") for column in columns])
    return "Accuracy (%)", rows, _ACCURACIES, notes


def _pairings(comparison: Comparison) -> list[_Section]:
    """Return the paired tests, one table for each baseline."""
    tables: dict[str, list[list[str]]] = {}
    for pairing in comparison.pairings:
        head = ["run", "benchmark", "points", "95 % interval", "items"]
        head += [f"only {pairing.first} right", "only the run right", "p", "p (Holm)"]
        rows = tables.setdefault(pairing.first, [head])
        star = "*" if pairing.marked else ""
        rows.append([pairing.other, heading(pairing.column) + star] + _pairing_cells(pairing))
    sections: list[_Section] = []
    for first, rows in tables.items():
        sections.append((f"Points above {first}, over the same items", rows, _PAIRINGS, []))
    return sections


def _pairing_cells(pairing: Pairing) -> list[str]:
    """Return points, interval, three counts of items and two p-values."""
    if pairing.not_paired:
        return [f"not paired: {pairing.not_paired}"] + ["-"] * 6
    points, interval = difference(pairing)
    cells = [points, interval]
    for count in (pairing.items, pairing.only_first, pairing.only_other):
        cells.append(_cell(count, ""))
    for p in (pairing.p, pairing.p_holm):
        # If no item differs, p is 1 and says nothing.
        if interval == UNDECIDED:
            cells.append("-")
        elif p is not None and p < 0.001:
            cells.append("< 0.001")
        else:
            cells.append(_cell(p, ".3f"))
    return cells


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _costs(comparison: Comparison) -> _Section:
    """Return what each training run cost, from its log."""
    head = ["run", "trained as", "seed", "steps", "tokens with padding", "held-out loss"]
    rows = [head + ["tokens/s", "FLOPs"]]
    for runs in comparison.settings.values():
        for run in runs:
            steps = run.state.get("global_step", 0)
            tokens = steps * run.options["global_batch_tokens"]
            log = run.state.get("log_history", [])
            speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
            row = [run.label, run.name, str(run.seed[0]), f"{steps:,}", f"{tokens:,}"]
            row.append(_cell(run.eval_loss, ".4f"))
            # The first steps compile and warm up, so the median says more than the mean.
            row.append(_cell(median(speeds) if speeds else None, ",.0f"))
            row.append(_cell(run.state.get("total_flos"), ".2e"))
            rows.append(row)
    return "Cost", rows, _COSTS, []


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.html`, `.md`, `.json` and, if there are accuracies, `.png`."""
    write_json(directory / _RECORD, to_json(comparison))
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    pictures = []
    if comparison.evaluations:
        figure = draw_bars(bar_series(comparison))
        figure.savefig(directory / "comparison.png")
        pictures.append(("Accuracy", _embed(figure), _BARS))
    # A run that was stopped before its first log has no curves.
    curves = read_curves(comparison.settings)
    if curves:
        pictures.append(("Along the training", _embed(draw_curves(curves)), _CURVES))
    page = TEMPLATES.get_template("comparison.html").render(
        findings=findings(comparison), pictures=pictures, sections=_sections(comparison)
    )
    write_text(directory / "comparison.html", page)


def _embed(figure: Figure) -> str:
    """Return a figure as a data URL, which a page can contain."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs on this machine and in Weights & Biases."""
    parser = Parser("vocagnolm compare", __doc__)
    add = parser.add_argument
    run = "A run of vocagnolm train, or an evaluation."
    projects = "Projects in Weights & Biases. --output_dir keeps their runs."
    row = "A row of the paper, or a table, such as 'Table 2'. May be repeated."
    add("runs", nargs="*", type=Path, metavar="RUN", help=run)
    add("--wandb", nargs="+", default=[], metavar="ENTITY/PROJECT", help=projects)
    add("--reported", action="append", default=[], metavar="NAME", help=row)
    add("--output_dir", type=Path, help="For comparison.html, .md, .json and .png.")
    arguments = parser.parse_args(argv)
    out, runs = arguments.output_dir, arguments.runs
    # Without --output_dir, fetched runs are needed only until they are compared.
    with TemporaryDirectory() as scratch, output_directory(out or Path(scratch), _RECORD):
        if arguments.wandb:
            require("wandb", "--wandb")
            from vocagnolm.report.fetch import fetch

            runs += fetch(arguments.wandb, out or Path(scratch))
        comparison = compare(runs, arguments.reported)
        if out:
            write_comparison(comparison, out)
    print_main(comparison_markdown(comparison).rstrip("\n"))
