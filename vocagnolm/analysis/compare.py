"""Evaluated runs side by side, with the paper's reported rows, and the differences between them.

The first run is the baseline of the others, over the same items. Numbers are never mixed: runs that
were asked or graded differently are not paired, and a number that is partial, or of other prompts
or data than the published ones, is marked wherever it is shown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from vocagnolm.analysis.paired import Difference, Pairing, pair
from vocagnolm.analysis.panels import broken
from vocagnolm.analysis.runs import Run, heading, in_order, read_reported, read_runs
from vocagnolm.host.files import write_text
from vocagnolm.host.plots import SMALL, new_plot, save_plot, series_style
from vocagnolm.host.tables import markdown_table

RESAMPLES = 10_000
SEED = 0
_STAR = "*: may not be put beside a published number; the notes on its run say why."


@dataclass(frozen=True)
class Comparison:
    """Some runs compared.

    Attributes:
        runs: evaluations, the baseline first.
        scores: all their numbers, as rows: run, column, second, value, rounded, low, high, marked.
        reported: the paper's numbers: row, table, column, reported.
        against_reported: rows of `scores` beside rows of `reported`, with the difference in points
            and whether the reported number is inside our 95 % interval.
        source: the paper.
        pairings: every other run against the first.
        resamples: bootstrap resamples.
        seed: bootstrap seed.
    """

    runs: Sequence[Run]
    scores: pd.DataFrame
    reported: pd.DataFrame
    against_reported: pd.DataFrame
    source: str
    pairings: Sequence[Pairing]
    resamples: int
    seed: int


def compare(
    paths: Sequence[Path],
    reported: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Read runs, pair each with the first, and put the paper's numbers beside them.

    Args:
        paths: directories of evaluations, or of models that hold theirs in `evaluation/`.
        reported: names of rows of the paper's Tables 1 and 4.
        resamples: bootstrap resamples, at least 1.
        seed: bootstrap seed.

    Raises:
        ValueError: a directory, a file or a name is wrong, or there is nothing to compare.
    """
    if resamples < 1 or seed < 0:
        raise ValueError(
            "expected --resamples of at least 1 and --seed of at least 0, "
            f"found {resamples} and {seed}: give others"
        )
    source, rows = read_reported(reported)
    runs = read_runs(paths)
    pairings = [pair(runs[0], run, resamples, seed) for run in runs[1:]]
    scores = pd.DataFrame({"run": r.label, **asdict(score)} for r in runs for score in r.scores)
    theirs = pd.DataFrame(
        [
            {"row": row.name, "table": row.table, "column": column, "reported": value}
            for row in rows
            for column, value in row.values.items()
        ],
        columns=["row", "table", "column", "reported"],
    )
    # Every number of ours beside every reported number of its column.
    verdicts = scores[~scores.second]
    against = verdicts.merge(theirs, on="column")
    for row, run in itertools.product(rows, runs):
        if against[(against.row == row.name) & (against.run == run.label)].empty:
            columns = ", ".join(verdicts.column[verdicts.run == run.label])
            raise ValueError(
                f"expected {run.label} to share a column with the reported {row.name!r}, found "
                f"{columns}: evaluate the paper's benchmarks or leave it out"
            )
    against = against.assign(
        points=(against.rounded - against.reported).round(1),
        inside=against.reported.between(against.low, against.high),
    )
    return Comparison(runs, scores, theirs, against, source, pairings, resamples, seed)


# -- Tables ----------------------------------------------------------------------------------


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out the comparison as tables."""
    runs, scores = comparison.runs, comparison.scores
    parts = ["## Accuracy (%)", "", _accuracies(comparison)]
    parts += ["", f"+-: half the width of the 95 % interval. {_STAR}"]
    for run in runs:
        parts.append(f"- {run.label}: {run.model}; verdicts of {run.grader}")
        parts += [f"  - {note}" for note in run.notes]
    if len(comparison.reported):
        parts.append(f"- reported: as printed in {comparison.source}")
    # The second opinion has a table of its own: no number of it may stand beside a verdict.
    second = scores[scores.second]
    if len(second):
        columns, cells = in_order(second.column), _cells(second)
        rows = [["run", "grader", "prompts", *map(heading, columns)]]
        for run in runs:
            if run.label in set(second.run):
                found = (cells.get((run.label, column), "-") for column in columns)
                rows.append([run.label, run.second_opinion, run.prompts, *found])
        parts += ["", "## Accuracy (%), second opinion", "", markdown_table(rows)]
    for pairing in comparison.pairings:
        parts += _pairing(pairing, comparison)
    if len(comparison.reported):
        parts += _against_reported(comparison)
    return "\n".join(parts) + "\n"


def _accuracies(comparison: Comparison) -> str:
    verdicts = comparison.scores[~comparison.scores.second]
    theirs = comparison.reported
    columns, cells = in_order([*verdicts.column, *theirs.column]), _cells(verdicts)
    # Reported rows stand below ours, in the same columns.
    cells |= _by_pair(theirs, "row", (f"{value:.1f}" for value in theirs.reported))
    rows = [["run", "prompts", *map(heading, columns)]]
    for run in comparison.runs:
        found = (cells.get((run.label, column), "-") for column in columns)
        rows.append([run.label, run.prompts, *found])
    for name, table in dict(zip(theirs.row, theirs.table, strict=True)).items():
        found = (cells.get((name, column), "-") for column in columns)
        rows.append([f"reported: {name} ({table})", "paper", *found])
    return markdown_table(rows)


def _cells(scores: pd.DataFrame) -> dict[tuple[str, str], str]:
    texts = (
        f"{score.rounded:.1f}{_star(score.marked)} +- {(score.high - score.low) / 2:.1f}"
        for score in scores.itertuples()
    )
    return _by_pair(scores, "run", texts)


def _by_pair(rows: pd.DataFrame, name: str, texts: Iterable[str]) -> dict[tuple[str, str], str]:
    """Key texts by run (or reported row) and column."""
    return dict(zip(zip(rows[name], rows.column, strict=True), texts, strict=True))


def _star(marked: Sequence[str]) -> str:
    return "*" if marked else ""


def _pairing(pairing: Pairing, comparison: Comparison) -> list[str]:
    runs = {run.label: run for run in comparison.runs}
    first, other = runs[pairing.first], runs[pairing.other]
    marked = {
        score.column
        for run in (first, other)
        for score in run.scores
        if score.marked and not score.second
    }
    rows = [["", "points", "95 % interval", "items"]]
    rows[0] += [f"only {first.label} right", f"only {other.label} right", "p", "p (Holm)"]
    for column in in_order([*pairing.differences, *pairing.refused]):
        name = heading(column) + ("*" if column in marked else "")
        if column in pairing.refused:
            rows.append([name, f"not paired: {pairing.refused[column]}", *["-"] * 6])
        else:
            rows.append([name, *_difference_cells(pairing.differences[column])])
    return [
        "",
        f"## {other.label} less {first.label}, over the same items",
        "",
        markdown_table(rows),
        "",
        "points: of the accuracies before they are rounded. Interval: paired bootstrap, "
        f"{comparison.resamples:,} resamples, seed {comparison.seed}; too narrow where few items "
        "are decided by one run only. p: McNemar's exact test, two-sided, not corrected for the "
        "number of benchmarks; p (Holm): corrected. Prompts of "
        f"{first.label}: {first.prompts}; of {other.label}: {other.prompts}. {_STAR}",
    ]


def _difference_cells(difference: Difference) -> list[str]:
    low, high = difference.interval
    cells = [_points(difference.points), f"{_points(low)} to {_points(high)}"]
    counts, p_values = difference.counts, (difference.p, difference.p_holm)
    if counts is None:
        return [*cells, "-", "-", "-", "-", "-"]
    cells += map(str, (counts.n, counts.only_first, counts.only_other))
    return cells + [f"{p:.3f}" if p and p >= 0.001 else "< 0.001" for p in p_values]


def _against_reported(comparison: Comparison) -> list[str]:
    against = comparison.against_reported
    columns = in_order(against.column)
    cells = {
        (line.row, line.run, line.column): (
            f"{_points(line.points)}{_star(line.marked)} {'in' if line.inside else 'out'}"
        )
        for line in against.itertuples()
    }
    rows = [["", "prompts", *map(heading, columns)]]
    for name, run in itertools.product(dict.fromkeys(comparison.reported.row), comparison.runs):
        found = (cells.get((name, run.label, column), "-") for column in columns)
        rows.append([f"{run.label} less reported: {name}", run.prompts, *found])
    return [
        "",
        "## Points above the reported numbers",
        "",
        markdown_table(rows),
        "",
        "in, out: the reported number lies in or out of the 95 % interval of ours, which is of our "
        f"number alone; the reported one has an error of its own. {_STAR}",
    ]


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # never -0.0


# -- Files -----------------------------------------------------------------------------------


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw accuracies with their intervals by column; reported ones are hollow."""
    verdicts, theirs = comparison.scores[~comparison.scores.second], comparison.reported
    columns = in_order(verdicts.column)
    places = {column: place for place, column in enumerate(columns)}
    figure, (axes,) = new_plot(4 + 0.75 * len(columns), 4)
    names = list(dict.fromkeys(theirs.row))
    count = len(comparison.runs) + len(names)
    # Marks of runs and rows stand side by side, centred on their column.
    offsets = [0.6 * ((number + 0.5) / count - 0.5) for number in range(count)]
    for number, run in enumerate(comparison.runs):
        found = verdicts[verdicts.run == run.label]
        bars = [(found.value - found.low).abs(), (found.high - found.value).abs()]
        label = f"{run.label} (prompts: {run.prompts})"
        at = found.column.map(places) + offsets[number]
        style = series_style(number)
        axes.errorbar(at, found.value, bars, label=label, capsize=2, linestyle="none", **style)
    for number, name in enumerate(names, len(comparison.runs)):
        found = theirs[(theirs.row == name) & theirs.column.isin(columns)]
        at = found.column.map(places) + offsets[number]
        style = series_style(number) | {"linestyle": "none", "markerfacecolor": "none"}
        axes.errorbar(at, found.reported, label=f"reported: {name}", **style)
    marked = verdicts[verdicts.marked.map(bool)]
    starred = [heading(c) + ("*" if c in set(marked.column) else "") for c in columns]
    axes.set_xticks(range(len(columns)), broken(starred), fontsize=SMALL)
    axes.set(ylabel="accuracy (%)", ylim=(0, None))
    axes.legend(frameon=False, fontsize=SMALL, loc="upper left", bbox_to_anchor=(1, 1))
    graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
    title = f"bars: 95 % intervals; verdicts of {graders}"
    if len(marked):
        title += f"\n*: {', '.join(sorted({word for words in marked.marked for word in words}))}"
    axes.set_title(title, fontsize=SMALL)
    save_plot(figure, path)


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.json`, `comparison.md` and `comparison.png`."""
    text = json.dumps(
        {
            "source": comparison.source,
            "resamples": comparison.resamples,
            "seed": comparison.seed,
            "runs": [_about(run) for run in comparison.runs],
            "scores": comparison.scores.to_dict("records"),
            "reported": comparison.reported.to_dict("records"),
            "against_reported": comparison.against_reported.to_dict("records"),
            "pairings": [asdict(pairing) for pairing in comparison.pairings],
        },
        indent=2,
        default=str,
    )
    write_text(directory / "comparison.json", text + "\n")
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    draw_comparison(comparison, directory / "comparison.png")


def _about(run: Run) -> dict[str, object]:
    """Return all of a run but its numbers, which are in the frame."""
    return {name: value for name, value in asdict(run).items() if name != "scores"}
