"""Compare runs: accuracies, paired tests, curves, settings and costs, on one page.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare --wandb lab/students --output_dir out

The first run is the baseline of the others, over the same items. Numbers are never mixed: runs
that were asked or graded differently are not paired, and a number that is partial, or of other
prompts or data than the published ones, is marked wherever it is shown. Exit status: 0 done, 2 a
wrong argument or file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from vocagnolm.cli import Parser, shell
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.extras import require
from vocagnolm.hub import public_name
from vocagnolm.io import JsonObject, check_writable, markdown_table, write_json, write_text
from vocagnolm.printing import print_main
from vocagnolm.report.plots import bar_series, draw_bars, draw_curves, embed, read_curves
from vocagnolm.report.render import TEMPLATES
from vocagnolm.report.runs import (
    Row,
    Run,
    TrainingRun,
    differing,
    find_places,
    group_by_setting,
    heading,
    in_order,
    read_reported,
    read_run,
    read_training,
)
from vocagnolm.report.statistics import RESAMPLES, mcnemar_p, pair

# All that has to be known to read the tables and pictures.
_STAR = "*: may not be put beside a published number; the notes on its run say why."
_ACCURACIES = f"In brackets: the 95 % interval. {_STAR}"
_PAIRINGS = (
    f"Interval: paired bootstrap, {RESAMPLES:,} resamples; too narrow where few items are decided "
    "by one run only. p: McNemar's exact test, two-sided; p (Holm): corrected for the "
    f"number of benchmarks. {_STAR}"
)
_COSTS = (
    "Tokens/s: the median of the log. Time: since the training was last started. FLOPs: of the "
    "student and of the teachers that are in the run; those of scoring a store are not counted."
)
_UNDECIDED = "no item decides"
_BARS = (
    "Bars of one run: 95 % interval of its evaluation; of several seeds: their mean and standard "
    "deviation. Hollow: as reported (arXiv 2503.19123v1)."
)
_CURVES = (
    "Over the seeds of a setting: the mean, and a band from the lowest to the highest. Of the "
    "excess: the tokens' median, and a band from their 10th to their 90th percentile."
)
# What a method that chooses tokens has to beat, as in `METHODS`, and how to run it.
_CONTROLS = {
    "CPT": "plain pretraining (--method cpt)",
    "random tokens": "the random control (--method random)",
}
_CHOOSING = {"VocAgnoLM", "Rho-1", "chunks"}
# Options by which losses per token are of the same tokens.
_OF_TOKENS = ("student", "student_tokenizer", "eval_fraction")
# Title, rows with their header first, notes.
_Section = tuple[str, list[list[str]], Sequence[str]]


@dataclass(frozen=True)
class Comparison:
    """Some runs compared."""

    # Evaluations, the baseline first.
    runs: Sequence[Run]
    # Runs of vocagnolm train, and the same by their setting.
    trained: Sequence[TrainingRun]
    settings: Mapping[str, Sequence[TrainingRun]]
    # Names of all of them.
    labels: Sequence[str]
    # The paper's numbers: row, table, column, reported.
    reported: Sequence[Row]
    # Every other run against the first of its protocol, few-shot or chat, as `pair` does.
    pairings: Sequence[Row]


def compare(paths: Sequence[Path], reported: Sequence[str] = ()) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper."""
    if not paths:
        raise ValueError("no RUN to compare: give directories of vocagnolm train or evaluate")
    theirs, places = read_reported(reported), find_places(paths)
    runs = [read_run(label, place) for label, (_, place) in places.items() if place]
    trained = [read_training(label, place) for label, (place, _) in places.items() if place]
    # Asked few-shot and in a chat, a model gives other answers to other prompts.
    first: dict[bool, Run] = {}
    pairings: list[Row] = []
    for run in runs:
        baseline = first.setdefault(run.prompts == "chat", run)
        if baseline is not run:
            pairings += pair(baseline, run)
    settings = group_by_setting(trained)
    return Comparison(runs, trained, settings, list(places), theirs, pairings)


def findings(comparison: Comparison) -> list[str]:
    """Say what a comparison shows in sentences: of answers, then of held-out losses."""
    settings = comparison.settings
    methods = {runs[0].method for runs in settings.values()}
    controls = [name for name, runs in settings.items() if runs[0].method in _CONTROLS]
    # Others are held against the controls, or against the first setting.
    references = controls if 0 < len(controls) < len(settings) else [*settings][:1]
    found = []
    for name in settings:
        for reference in references if name not in references else ():
            found += _held_out(name, reference, settings)
    missing = [control for method, control in _CONTROLS.items() if method not in methods]
    if missing and methods & _CHOOSING:
        found.append(f"Whether the guidance helps cannot be said without {' and '.join(missing)}.")
    # Answers first: held-out pages may be as wrong as the corpus, and so may a loss on them be.
    return _answers(comparison) + found


def _answers(comparison: Comparison) -> list[str]:
    """Say by how many points the answers of one run are better than those of another."""
    found = []
    paired = [x for x in comparison.pairings if not x["not_paired"]]
    for first, other in dict.fromkeys((x["first"], x["other"]) for x in paired):
        rows = [x for x in paired if (x["first"], x["other"]) == (first, other)]
        # An average speaks for its benchmarks.
        rows = [x for x in rows if x["column"] in AVERAGES][:1] or rows
        shown = []
        for x in rows:
            points, interval = _difference(x)
            shown.append(f"{heading(x['column'])} {points} ({interval})")
        found.append(f"{other} against {first}, in points: {'; '.join(shown)}.")
    return found


def _held_out(
    name: str, reference: str, settings: Mapping[str, Sequence[TrainingRun]]
) -> list[str]:
    """Compare the held-out losses of two settings, if they have some of one student.

    Of the same texts: texts of equally many tokens are taken to be those.
    """
    # Another vocabulary has other tokens, and its nats per token are other numbers.
    both = settings[name], settings[reference]
    students = [[runs[0].options.get(option) for option in _OF_TOKENS] for runs in both]
    ours, theirs = (
        {run.seed: run.eval_loss for run in runs if run.eval_loss is not None} for runs in both
    )
    if not ours or not theirs or students[0] != students[1]:
        return []
    common = ours.keys() & theirs.keys() or ours.keys() | theirs.keys()
    texts = [{run.eval_tokens for run in runs if run.seed in common} for runs in both]
    if texts[0] != texts[1]:
        return [f"{name} and {reference} were not evaluated on the same texts."]
    gain = fmean(theirs.values()) - fmean(ours.values())
    ahead, behind = (name, reference) if gain > 0 else (reference, name)
    gains = [theirs[seed] - ours[seed] for seed in ours if seed in theirs]
    if len(gains) > 1:
        wins, losses = sum(x > 0 for x in gains), sum(x < 0 for x in gains)
        share = f"{wins if gain > 0 else losses} of {len(gains)}"
        test = f"with {share} seeds, sign test p = {mcnemar_p(wins, losses):.3f}"
    else:
        seeds = "one seed each" if len(ours) == len(theirs) == 1 else "no two seeds in common"
        test = f"{seeds}: no test possible"
    return [f"{ahead} is ahead of {behind} by {abs(gain):.3f} nats on held-out text; {test}."]


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out a comparison as its findings and tables."""
    parts = ["\n".join(f"- {finding}" for finding in findings(comparison))]
    for title, rows, notes in _sections(comparison):
        # A note, and a list about the runs.
        text = "\n".join(notes).replace("\n- ", "\n\n- ", 1)
        parts.append(f"## {title}\n\n{markdown_table(rows)}\n\n{text}".rstrip("\n"))
    return "\n\n".join(filter(None, parts)) + "\n"


def _sections(comparison: Comparison) -> list[_Section]:
    firsts = [runs[0] for runs in comparison.settings.values()]
    options = [["option", *comparison.settings]]
    options += [[name, *texts] for name, texts in differing(firsts).items()]
    sections = [_accuracies(comparison), *_pairings(comparison)]
    sections += [("Settings that differ", options, []), _costs(comparison)]
    # Without a table that is nothing but its header.
    return [section for section in sections if len(section[1]) > 1]


def _accuracies(comparison: Comparison) -> _Section:
    notes = [_ACCURACIES]
    # Cells by column of each line, a run and its prompts.
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for run in comparison.runs:
        cells = lines[run.label, run.prompts] = {}
        for x in run.scores:
            star = "*" if x["marked"] else ""
            interval = f"{x['low']:.1f} to {x['high']:.1f}"
            cells[x["column"]] = f"{x['rounded']:.1f}{star} ({interval})"
        name, revision = run.model.rsplit(", revision ", 1)
        # As much of a hash as identifies it.
        model = f"{public_name(name)}, revision {revision[:19]}"
        notes.append(f"- {run.label}: {model}; verdicts of {run.grader}")
        notes += [f"  - {note}" for note in run.notes]
    # Reported rows stand below ours, in the same columns.
    for x in comparison.reported if comparison.runs else ():
        cells = lines.setdefault((f"reported: {x['row']} ({x['table']})", "paper"), {})
        cells[x["column"]] = f"{x['reported']:.1f}"
    columns = in_order(column for cells in lines.values() for column in cells)
    rows = [["run", "prompts", *map(heading, columns)]]
    for line, cells in lines.items():
        rows.append([*line, *(cells.get(column, "-") for column in columns)])
    return "Accuracy (%)", rows, notes


def _pairings(comparison: Comparison) -> list[_Section]:
    """Lay out the paired tests, a table for each baseline."""
    marked = {(x["run"], x["column"]) for run in comparison.runs for x in run.scores if x["marked"]}
    tables: dict[str, list[list[str]]] = {}
    for x in comparison.pairings:
        first, other, column = x["first"], x["other"], x["column"]
        head = ["run", "benchmark", "points", "95 % interval", "items"]
        head += [f"only {first} right", "only the run right", "p", "p (Holm)"]
        rows = tables.setdefault(first, [head])
        star = "*" if {(first, column), (other, column)} & marked else ""
        row = [other, heading(column) + star]
        if x["not_paired"]:
            rows.append([*row, f"not paired: {x['not_paired']}", *["-"] * 6])
            continue
        points, interval = _difference(x)
        counts = [_cell(x[y], "") for y in ("items", "only_first", "only_other")]
        row += [points, interval, *counts]
        for p in (x["p"], x["p_holm"]):
            p = None if interval == _UNDECIDED else p
            row.append("< 0.001" if p is not None and p < 0.001 else _cell(p, ".3f"))
        rows.append(row)
    return [
        (f"Points above {first}, over the same items", rows, [_PAIRINGS])
        for first, rows in tables.items()
    ]


def _difference(row: Row) -> tuple[str, str]:
    """Write the points of a pairing, and their interval."""
    # Plus 0.0: never -0.0.
    points, low, high = (f"{round(row[x], 1) + 0.0:+.1f}" for x in ("points", "low", "high"))
    is_decided = row["points"] or row["low"] or row["high"]
    return points, f"{low} to {high}" if is_decided else _UNDECIDED


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _costs(comparison: Comparison) -> _Section:
    rows = [["run", "trained as", "seed", "steps", "student tokens", "held-out loss"]]
    rows[0] += ["tokens/s", "time", "FLOPs"]
    for run in comparison.trained:
        log, steps = run.state.get("log_history", []), run.state.get("global_step", 0)
        speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
        seconds = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
        row = [run.label, run.name, str(json.loads(run.seed)[0])]
        row += [f"{steps:,}", f"{steps * run.batch_tokens:,}", _cell(run.eval_loss, ".4f")]
        row.append(_cell(median(speeds) if speeds else None, ",.0f"))
        row.append(str(timedelta(seconds=round(max(seconds)))) if seconds else "-")
        rows.append([*row, _cell(run.state.get("total_flos"), ".2e")])
    return "Cost", rows, [_COSTS]


def to_json(comparison: Comparison) -> JsonObject:
    """Return the content of `comparison.json`, from which benchmarks/figures.py draws."""
    setting_of = {x.label: name for name, runs in comparison.settings.items() for x in runs}
    evaluated = ("label", "model", "grader", "prompts", "conditions", "notes")
    trained = ("method", "teacher", "seed", "options", "eval_loss")
    return {
        "runs": [{name: getattr(run, name) for name in evaluated} for run in comparison.runs],
        "trained": [
            {"run": run.label, "setting": setting_of[run.label]}
            | {name: getattr(run, name) for name in trained}
            for run in comparison.trained
        ],
        "scores": [score for run in comparison.runs for score in run.scores],
        "reported": comparison.reported,
        "pairings": comparison.pairings,
    }


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.html`, `.md`, `.json` and, of what has accuracies, `.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "comparison.json", to_json(comparison))
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    pictures = []
    if comparison.runs:
        graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
        series = bar_series(comparison.runs, comparison.settings, comparison.reported)
        columns = in_order(column for bars in series.values() for column in bars.index)
        headings = {column: heading(column) for column in columns}
        figure = draw_bars(series, headings, f"Accuracies; verdicts of {graders}")
        figure.savefig(directory / "comparison.png")
        pictures.append(("Accuracy", embed(figure), _BARS))
    if curves := read_curves(comparison.settings):
        pictures.append(("Along the training", embed(draw_curves(curves)), _CURVES))
    page = TEMPLATES.get_template("comparison.html").render(
        names=comparison.labels,
        findings=findings(comparison),
        baselines=list(dict.fromkeys(x["first"] for x in comparison.pairings)),
        pictures=pictures,
        sections=_sections(comparison),
    )
    write_text(directory / "comparison.html", page)


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs, from here and from Weights & Biases."""
    parser = Parser("vocagnolm compare", __doc__)
    add = parser.add_argument
    projects = "Runs in Weights & Biases; with --output_dir they are kept there."
    row = "A row of the paper, or a whole table, as 'Table 2'; again for more."
    add("runs", nargs="*", type=Path, metavar="RUN", help="A run, or an evaluation.")
    add("--wandb", nargs="+", default=[], metavar="ENTITY/PROJECT", help=projects)
    add("--reported", action="append", default=[], metavar="NAME", help=row)
    add("--output_dir", type=Path, help="Gets comparison.html, .md, .json and .png.")
    arguments = parser.parse_args(argv)
    out = arguments.output_dir
    # Before the work, which may take minutes.
    if out:
        check_writable(out)
    with TemporaryDirectory() as scratch:
        runs = arguments.runs
        if arguments.wandb:
            require("wandb", "--wandb")
            from vocagnolm.report.fetch import fetch

            runs += fetch(arguments.wandb, out or Path(scratch))
        comparison = compare(runs, arguments.reported)
        if out:
            write_comparison(comparison, out)
        print_main(comparison_markdown(comparison).rstrip("\n"))
