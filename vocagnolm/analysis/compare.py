"""Evaluated runs side by side, with the paper's reported rows, and the differences between them.

The first run is the baseline of the others, over the same items. Numbers are never mixed: runs that
were asked or graded differently are not paired, and a number that is partial, or of other prompts
or data than the published ones, is marked wherever it is shown.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

from vocagnolm.analysis.paired import Pairing, pair
from vocagnolm.analysis.panels import Figure, Mark, Panel, draw_figure, line
from vocagnolm.analysis.paper import read_reported
from vocagnolm.analysis.runs import Run, heading, in_order, read_runs, reject
from vocagnolm.host.files import write_text
from vocagnolm.host.tables import markdown_table

RESAMPLES = 10_000
SEED = 0
_STAR = "*: may not be put beside a published number; the notes on its run say why."

Cells = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Comparison:
    """Some runs compared."""

    # Evaluations, the baseline first.
    runs: Sequence[Run]
    # All their numbers, as rows: run, column, second, value, rounded, low, high, marked.
    scores: pd.DataFrame
    # The paper's numbers: row, table, column, reported.
    reported: pd.DataFrame
    # Rows of `scores` beside rows of `reported`, with the difference in points and whether the
    # reported number is inside our 95 % interval.
    against_reported: pd.DataFrame
    source: str
    # Every other run against the first.
    pairings: Sequence[Pairing]
    resamples: int
    seed: int

    @property
    def verdicts(self) -> pd.DataFrame:
        """The scores by the first grader."""
        return self.scores[~self.scores.second]


def compare(
    paths: Sequence[Path],
    reported: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Read evaluations, pair each with the first, and put rows of the paper beside them.

    Raises:
        ValueError: a directory, a file or a name is wrong, or there is nothing to compare.
    """
    if not paths:
        advice = "give directories of evaluate_math.py, or --figure 4 with --reported 'Table 1'"
        reject("a RUN to compare", "none", advice)
    if resamples < 1 or seed < 0:
        expected = "--resamples of at least 1 and --seed of at least 0"
        reject(expected, f"{resamples} and {seed}", "give others")
    source, theirs = read_reported(reported)
    runs = read_runs(paths)
    pairings = [pair(runs[0], run, resamples, seed) for run in runs[1:]]
    scores = pd.DataFrame({"run": run.label, **score} for run in runs for score in run.scores)
    # Every number of ours beside every reported number of its column.
    verdicts = scores[~scores.second]
    against = verdicts.merge(theirs, on="column")
    beside = set(zip(against.row, against.run, strict=True))
    for row in dict.fromkeys(theirs.row):
        for run in dict.fromkeys(verdicts.run):
            if (row, run) not in beside:
                found = ", ".join(verdicts.column[verdicts.run == run])
                advice = "evaluate the paper's benchmarks or leave it out"
                reject(f"{run} to share a column with the reported {row!r}", found, advice)
    against = against.assign(
        points=(against.rounded - against.reported).round(1),
        inside=against.reported.between(against.low, against.high),
    )
    return Comparison(runs, scores, theirs, against, source, pairings, resamples, seed)


# -- Tables ----------------------------------------------------------------------------------


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out the comparison as tables."""
    runs, theirs, verdicts = comparison.runs, comparison.reported, comparison.verdicts
    printed = zip(theirs.row, theirs.column, theirs.reported, strict=True)
    # Reported rows stand below ours, in the same columns.
    cells = _cells(verdicts) | {(row, column): f"{value:.1f}" for row, column, value in printed}
    tables = dict(zip(theirs.row, theirs.table, strict=True))
    heads = {run.label: [run.label, run.prompts] for run in runs}
    heads |= {row: [f"reported: {row} ({table})", "paper"] for row, table in tables.items()}
    parts = ["## Accuracy (%)", "", _table(["run", "prompts"], heads, cells)]
    parts += ["", f"+-: half the width of the 95 % interval. {_STAR}"]
    for run in runs:
        parts.append(f"- {run.label}: {run.model}; verdicts of {run.grader}")
        parts += [f"  - {note}" for note in run.notes]
    if tables:
        parts.append(f"- reported: as printed in {comparison.source}")
    # The second opinion has a table of its own: no number of it may stand beside a verdict.
    cells = _cells(comparison.scores[comparison.scores.second])
    judged = {label for label, _ in cells}
    heads = {x.label: [x.label, x.second_opinion, x.prompts] for x in runs if x.label in judged}
    if heads:
        table = _table(["run", "grader", "prompts"], heads, cells)
        parts += ["", "## Accuracy (%), second opinion", "", table]
    for pairing, other in zip(comparison.pairings, runs[1:], strict=True):
        parts += _pairing(pairing, runs[0], other, comparison)
    if tables:
        parts += _against_reported(comparison, list(tables))
    return "\n".join(parts) + "\n"


def _table(titles: Sequence[str], heads: Mapping[str, Sequence[str]], cells: Cells) -> str:
    """Lay out cells by row and column, below the columns that any row has."""
    columns = in_order(column for _, column in cells)
    rows = [[*titles, *map(heading, columns)]]
    rows += [[*head, *(cells.get((key, c), "-") for c in columns)] for key, head in heads.items()]
    return markdown_table(rows)


def _cells(scores: pd.DataFrame) -> dict[tuple[str, str], str]:
    return {
        (x.run, x.column): f"{x.rounded:.1f}{_star(x.marked)} +- {(x.high - x.low) / 2:.1f}"
        for x in scores.itertuples()
    }


def _star(marked: object) -> str:
    return "*" if marked else ""


def _pairing(pairing: Pairing, first: Run, other: Run, comparison: Comparison) -> list[str]:
    scores = comparison.verdicts
    is_marked = scores.run.isin([first.label, other.label]) & scores.marked.map(bool)
    starred = set(scores.column[is_marked])
    rows = [["", "points", "95 % interval", "items"]]
    rows[0] += [f"only {first.label} right", f"only {other.label} right", "p", "p (Holm)"]
    for column in in_order([*pairing.differences, *pairing.refused]):
        name = heading(column) + _star(column in starred)
        if column in pairing.refused:
            rows.append([name, f"not paired: {pairing.refused[column]}", *["-"] * 6])
            continue
        found = pairing.differences[column]
        cells = [name, _points(found.points), " to ".join(map(_points, found.interval))]
        cells += [str(x) for x in asdict(found.counts).values()] if found.counts else ["-"] * 3
        rows.append(cells + [_p_value(p) for p in (found.p, found.p_holm)])
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


def _p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _against_reported(comparison: Comparison, rows: Sequence[str]) -> list[str]:
    cells = {
        (f"{x.run} less reported: {x.row}", x.column): (
            f"{_points(x.points)}{_star(x.marked)} {'in' if x.inside else 'out'}"
        )
        for x in comparison.against_reported.itertuples()
    }
    pairs = [
        (f"{x.label} less reported: {row}", x.prompts) for row in rows for x in comparison.runs
    ]
    titles = {title: (title, prompts) for title, prompts in pairs}
    return [
        "",
        "## Points above the reported numbers",
        "",
        _table(["", "prompts"], titles, cells),
        "",
        "in, out: the reported number lies in or out of the 95 % interval of ours, which is of our "
        f"number alone; the reported one has an error of its own. {_STAR}",
    ]


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # never -0.0


# -- Files -----------------------------------------------------------------------------------


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.json`, `comparison.md` and `comparison.png`."""
    content = asdict(comparison) | {
        name: frame.to_dict("records")
        for name, frame in vars(comparison).items()
        if isinstance(frame, pd.DataFrame)
    }
    for run in content["runs"]:
        # All its numbers are in the frame.
        del run["scores"]
    text = json.dumps(content, indent=2, default=str)
    write_text(directory / "comparison.json", text + "\n")
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    draw_figure(_figure(comparison), directory / "comparison.png")


def _figure(comparison: Comparison) -> Figure:
    """Plan accuracies with their intervals by column; reported ones are hollow."""
    verdicts, theirs = comparison.verdicts, comparison.reported
    columns = in_order(verdicts.column)
    found = []
    for style, run in enumerate(comparison.runs):
        marks = [
            Mark(heading(x.column), x.value, (x.low, x.high), _star(x.marked), x.marked, seeds=1)
            for x in verdicts[verdicts.run == run.label].itertuples()
        ]
        found += line(marks, f"{run.label} (prompts: {run.prompts})", style, joined=False)
    shown = theirs[theirs.column.isin(columns)]
    for style, (name, row) in enumerate(shown.groupby("row", sort=False), len(comparison.runs)):
        marks = [Mark(heading(x.column), x.reported) for x in row.itertuples()]
        found += line(marks, f"reported: {name}", style, joined=False, reported=True)
    graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
    panel = Panel("", "accuracy (%)", found, [heading(column) for column in columns])
    return Figure(0, f"Accuracies; verdicts of {graders}", [panel])
