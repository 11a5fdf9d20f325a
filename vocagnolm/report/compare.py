"""Compare runs: accuracies, paired tests, curves, settings and costs, on one page.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare --wandb lab/students --output_dir out

The first run is the baseline of the others, over the same items. Numbers are never mixed: runs
that were asked or graded differently are not paired, and a number that is partial, or of other
prompts or data than the published ones, is marked wherever it is shown. Exit status: 0 done, 2 a
wrong argument or file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from vocagnolm.cli import Parser, print_main, shell
from vocagnolm.io import JsonObject, check_writable, markdown_table, write_json, write_text
from vocagnolm.report.curves import read_curves
from vocagnolm.report.page import bar_series, draw_bars, draw_curves, render_page
from vocagnolm.report.paper import read_reported
from vocagnolm.report.plots import embed, save_plot
from vocagnolm.report.runs import (
    Run,
    TrainingRun,
    differing,
    find_sources,
    group_by_setting,
    heading,
    in_order,
    read_run,
    read_training,
    reject,
    setting_text,
)
from vocagnolm.report.statistics import PAIRING_COLUMNS, pair
from vocagnolm.report.wandb_runs import fetch
from vocagnolm.run.card import public_name

RESAMPLES = 10_000
_SCORE = ["run", "column", "value", "rounded", "low", "high", "marked"]
# All that has to be known to read the tables and pictures.
_STAR = "*: may not be put beside a published number; the notes on its run say why."
_ACCURACIES = f"+-: half the width of the 95 % interval. {_STAR}"
_PAIRINGS = (
    "Interval: paired bootstrap, {resamples:,} resamples, seed {seed}; too narrow where few items "
    "are decided by one run only. p: McNemar's exact test, two-sided; p (Holm): corrected for the "
    f"number of benchmarks. {_STAR}"
)
_COSTS = "Tokens/s: the median of the log. Hours: since the training was last started."
_BARS = (
    "Bars of one run: 95 % interval of its evaluation; of several seeds: their mean and standard "
    "deviation. Hollow: as reported (arXiv 2503.19123v1)."
)
_CURVES = (
    "Over the seeds of a setting: the mean, and a band from the lowest to the highest. Of the "
    "excess: the tokens' median, and a band from their 10th to their 90th percentile."
)
_Rows = Sequence[Sequence[str]]
# Title, rows with their header first, notes.
_Section = tuple[str, _Rows, Sequence[str]]


@dataclass(frozen=True)
class Comparison:
    """Some runs compared."""

    # Evaluations, the baseline first.
    runs: Sequence[Run]
    # Runs of train.py, and the same by their setting.
    trained: Sequence[TrainingRun]
    settings: Mapping[str, Sequence[TrainingRun]]
    # Names of all of them.
    labels: Sequence[str]
    # All numbers of the evaluations: columns as `_SCORE`.
    scores: pd.DataFrame
    # The paper's numbers: row, table, column, reported.
    reported: pd.DataFrame
    # Every other run against the first of its protocol, few-shot or chat: `PAIRING_COLUMNS`.
    pairings: pd.DataFrame
    resamples: int
    seed: int


def compare(
    paths: Sequence[Path], reported: Sequence[str] = (), resamples: int = RESAMPLES, seed: int = 0
) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper."""
    if not paths:
        reject("a RUN to compare", "none", "give directories of train.py or evaluate_math.py")
    theirs = read_reported(reported)
    sources = find_sources(paths)
    runs = [read_run(x.label, x.evaluation) for x in sources if x.evaluation]
    trained = [read_training(x.label, x.run) for x in sources if x.run]
    # Asked few-shot and in a chat, a model gives other answers to other prompts.
    first: dict[bool, Run] = {}
    pairings = []
    for run in runs:
        baseline = first.setdefault(run.prompts == "chat", run)
        if baseline is not run:
            pairings += pair(baseline, run, resamples, seed)
    rows = [{"run": run.label, **score} for run in runs for score in run.scores]
    scores = pd.DataFrame(rows, columns=_SCORE)
    return Comparison(
        runs=runs,
        trained=trained,
        settings=group_by_setting(trained),
        labels=[x.label for x in sources],
        scores=scores,
        reported=theirs,
        pairings=pd.DataFrame(pairings, columns=PAIRING_COLUMNS),
        resamples=resamples,
        seed=seed,
    )


# -- Tables ----------------------------------------------------------------------------------


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out the comparison as tables."""
    parts = []
    for title, rows, notes in _sections(comparison):
        # A note, and a list about the runs.
        text = "\n".join(notes).replace("\n- ", "\n\n- ", 1)
        parts.append(f"## {title}\n\n{markdown_table(rows)}\n\n{text}".rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def _sections(comparison: Comparison) -> list[_Section]:
    sections = [_accuracies(comparison), *_pairings(comparison), _settings(comparison)]
    sections.append(_costs(comparison))
    # Without a table that is nothing but its header.
    return [section for section in sections if len(section[1]) > 1]


def _accuracies(comparison: Comparison) -> _Section:
    cells = {
        (x.run, x.column): f"{x.rounded:.1f}{_star(x.marked)} +- {(x.high - x.low) / 2:.1f}"
        for x in comparison.scores.itertuples()
    }
    heads = {run.label: run.prompts for run in comparison.runs}
    # Reported rows stand below ours, in the same columns.
    if comparison.runs:
        for x in comparison.reported.itertuples():
            title = f"reported: {x.row} ({x.table})"
            cells[title, x.column], heads[title] = f"{x.reported:.1f}", "paper"
    columns = in_order(column for _, column in cells)
    rows = [["run", "prompts", *map(heading, columns)]]
    for label, prompts in heads.items():
        rows.append([label, prompts, *(cells.get((label, column), "-") for column in columns)])
    notes = [_ACCURACIES]
    for run in comparison.runs:
        name, revision = run.model.rsplit(", revision ", 1)
        # As much of a hash as identifies it.
        model = f"{public_name(name)}, revision {revision[:19]}"
        notes.append(f"- {run.label}: {model}; verdicts of {run.grader}")
        notes += [f"  - {note}" for note in run.notes]
    return "Accuracy (%)", rows, notes


def _pairings(comparison: Comparison) -> list[_Section]:
    """Lay out the paired tests, a table for each baseline."""
    marked = {(x.run, x.column) for x in comparison.scores.itertuples() if x.marked}
    note = _PAIRINGS.format(resamples=comparison.resamples, seed=comparison.seed)
    sections: list[_Section] = []
    for first, pairings in comparison.pairings.groupby("first", sort=False):
        rows = [["run", "benchmark", "points", "95 % interval", "items"]]
        rows[0] += [f"only {first} right", "only the run right", "p", "p (Holm)"]
        for other, of_run in pairings.groupby("other", sort=False):
            by_column = {x.column: x for x in of_run.itertuples()}
            for column in in_order(by_column):
                x = by_column[column]
                star = _star({(first, column), (other, column)} & marked)
                row = [str(other), heading(column) + star]
                if pd.notna(x.not_paired):
                    rows.append([*row, f"not paired: {x.not_paired}", *["-"] * 6])
                    continue
                row += [_points(x.points), f"{_points(x.low)} to {_points(x.high)}"]
                row += [_cell(count, ".0f") for count in (x.items, x.only_first, x.only_other)]
                for p in (x.p, x.p_holm):
                    row.append("-" if pd.isna(p) else "< 0.001" if p < 0.001 else f"{p:.3f}")
                rows.append(row)
        sections.append((f"Points above {first}, over the same items", rows, [note]))
    return sections


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # never -0.0


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:{form}}"


def _star(marked: object) -> str:
    return "*" if marked else ""


def _settings(comparison: Comparison) -> _Section:
    firsts = [runs[0] for runs in comparison.settings.values()]
    rows = [["option", *comparison.settings]]
    for name in differing(firsts):
        values = [setting_text(run.options.get(name)) for run in firsts]
        rows.append([name, *values])
    return "Settings that differ", rows, []


def _costs(comparison: Comparison) -> _Section:
    rows = [["run", "trained as", "seed", "steps", "student tokens", "held-out loss"]]
    rows[0] += ["tokens/s", "hours", "FLOPs of the student"]
    for run in comparison.trained:
        log, steps = run.state.get("log_history", []), run.state.get("global_step", 0)
        speeds = [entry["tokens_per_s"] for entry in log if "tokens_per_s" in entry]
        speed = statistics.median(speeds) if speeds else None
        seconds = [entry["train_runtime"] for entry in log if "train_runtime" in entry]
        hours = max(seconds) / 3600 if seconds else None
        row = [run.label, run.name, str(json.loads(run.seed)[0])]
        row += [f"{steps:,}", f"{steps * run.batch_tokens:,}"]
        # A loss that is not finite is shown.
        row.append("-" if run.eval_loss is None else f"{run.eval_loss:.4f}")
        row += [_cell(speed, ",.0f"), _cell(hours, ",.2f")]
        rows.append([*row, _cell(run.state.get("total_flos"), ".3g")])
    return "Cost", rows, [_COSTS]


# -- Files -----------------------------------------------------------------------------------


def to_json(comparison: Comparison) -> JsonObject:
    """Return the content of `comparison.json`, from which recipes/paper/figures.py draws."""
    setting_of = {x.label: name for name, runs in comparison.settings.items() for x in runs}
    evaluated = ("label", "model", "grader", "prompts", "conditions", "notes")
    trained = ("method", "teacher", "seed", "options", "eval_loss")
    content: JsonObject = {
        "runs": [{name: getattr(run, name) for name in evaluated} for run in comparison.runs],
        "trained": [
            {"run": run.label, "setting": setting_of[run.label]}
            | {name: getattr(run, name) for name in trained}
            for run in comparison.trained
        ],
    }
    for name in ("scores", "reported", "pairings"):
        # None stands for what a row has not.
        frame = getattr(comparison, name).astype(object)
        content[name] = frame.where(frame.notna(), None).to_dict("records")
    return content | {"resamples": comparison.resamples, "seed": comparison.seed}


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.html`, `.md`, `.json` and, of what has accuracies, `.png`."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "comparison.json", to_json(comparison))
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    pictures = []
    if comparison.runs:
        graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
        series = bar_series(comparison.runs, comparison.settings, comparison.reported)
        figure = draw_bars(series, f"Accuracies; verdicts of {graders}")
        save_plot(figure, directory / "comparison.png")
        pictures.append(("Accuracy", embed(figure), _BARS))
    if curves := read_curves(comparison.settings):
        pictures.append(("Along the training", embed(draw_curves(curves)), _CURVES))
    page = render_page(
        "comparison.html",
        names=comparison.labels,
        baselines=list(dict.fromkeys(comparison.pairings["first"])),
        pictures=pictures,
        sections=_sections(comparison),
    )
    write_text(directory / "comparison.html", page)


# -- The command -----------------------------------------------------------------------------


@shell("vocagnolm compare")
def main(argv: Sequence[str] | None = None) -> None:
    """Compare runs, from here and from Weights & Biases."""
    arguments = _parse(argv)
    out = arguments.output_dir
    # Before the work, which may take minutes.
    if out:
        check_writable(out)
    with TemporaryDirectory() as scratch:
        runs = arguments.runs
        if arguments.wandb:
            runs += fetch(arguments.wandb, out or Path(scratch))
        comparison = compare(runs, arguments.reported, arguments.resamples, arguments.seed)
        if out:
            write_comparison(comparison, out)
        print_main(comparison_markdown(comparison).rstrip("\n"))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("vocagnolm compare", __doc__)
    add = parser.add_argument
    shown = "A run of train.py, or the evaluation of any model."
    add("runs", nargs="*", type=Path, metavar="RUN", help=shown)
    projects = "Runs in Weights & Biases; with --output_dir they are kept there."
    add("--wandb", nargs="+", default=[], metavar="ENTITY/PROJECT", help=projects)
    row = "A row of the paper, or a whole table, as 'Table 2'; again for more."
    add("--reported", action="append", default=[], metavar="NAME", help=row)
    add("--output_dir", type=Path, help="Gets comparison.html, .md, .json and .png.")
    add("--resamples", type=int, default=RESAMPLES, help="Bootstrap resamples.")
    add("--seed", type=int, default=0, help="Bootstrap seed.")
    return parser.parse_args(argv)
