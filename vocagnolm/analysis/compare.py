"""Evaluated runs side by side, with the paper's reported rows, and what sets them apart.

    vocagnolm compare runs/a runs/b --reported "Qwen2.5-Math-Instruct VocAgnoLM" --output_dir out
    vocagnolm compare runs/* audits/* --figure 6 --output_dir out

The first run is what the others are compared with, over the same items. Numbers are never mixed:
what was asked or graded differently is not paired, and what is partial, or of other prompts or data
than the published numbers, is marked wherever it is shown. With --figure the paper's figures are
drawn instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.analysis.differences import (
    AgainstReported,
    Difference,
    Pairing,
    beside_reported,
    pair,
)
from vocagnolm.analysis.figures import MARKERS, NUMBERS, SHADES, make
from vocagnolm.analysis.runs import (
    Accuracy,
    ReportedRow,
    Run,
    heading,
    in_order,
    read_reported,
    read_runs,
)
from vocagnolm.host.files import check_writable, write_text
from vocagnolm.host.tables import markdown_table

RESAMPLES = 10_000
SEED = 0
_STAR = "*: may not be put beside a published number; the notes on its run say why."


@dataclass(frozen=True)
class Comparison:
    """All that is known of some runs; `asdict` of it is `comparison.json`."""

    runs: Sequence[Run]
    reported: Sequence[ReportedRow]
    source: str
    against_reported: Sequence[AgainstReported]
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
        resamples: of the paired bootstrap, at least 1.
        seed: of the same.

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
    against = [line for row in rows for run in runs for line in beside_reported(run, row)]
    return Comparison(runs, rows, source, against, pairings, resamples, seed)


def markdown(comparison: Comparison) -> str:
    """The comparison as tables."""
    parts = [*_accuracy_part(comparison), *_second_part(comparison)]
    for pairing in comparison.pairings:
        parts += _pairing_part(pairing, comparison)
    if comparison.reported:
        parts += _reported_part(comparison)
    return "\n".join(parts) + "\n"


def _accuracy_part(comparison: Comparison) -> list[str]:
    runs, rows = comparison.runs, comparison.reported
    columns = in_order(
        [c for run in runs for c in run.accuracies] + [c for r in rows for c in r.values]
    )
    lines = [[run.label, run.prompts, *_cells(run.accuracies, columns)] for run in runs]
    for row in rows:
        values = (f"{row.values[c]:.1f}" if c in row.values else "-" for c in columns)
        lines.append([f"reported: {row.name} ({row.table})", "paper", *values])
    notes = ["", f"+-: half the width of the 95 % interval. {_STAR}"]
    for run in runs:
        notes.append(f"- {run.label}: {run.model}; verdicts of {run.grader}")
        notes += [f"  - {note}" for note in run.notes]
    if rows:
        notes.append(f"- reported: as printed in {comparison.source}")
    header = ["run", "prompts", *map(heading, columns)]
    return ["## Accuracy (%)", "", markdown_table([header, *lines]), *notes]


def _second_part(comparison: Comparison) -> list[str]:
    """The second opinion has a table of its own, as no number of it may stand beside a verdict."""
    runs = [run for run in comparison.runs if run.second_accuracies]
    if not runs:
        return []
    columns = in_order(column for run in runs for column in run.second_accuracies)
    lines = [
        [run.label, run.second_opinion, run.prompts, *_cells(run.second_accuracies, columns)]
        for run in runs
    ]
    header = ["run", "grader", "prompts", *map(heading, columns)]
    return ["", "## Accuracy (%), second opinion", "", markdown_table([header, *lines])]


def _cells(accuracies: Mapping[str, Accuracy], columns: Iterable[str]) -> list[str]:
    return [_cell(accuracies[column]) if column in accuracies else "-" for column in columns]


def _cell(accuracy: Accuracy) -> str:
    low, high = accuracy.interval
    return f"{accuracy.rounded:.1f}{_star(accuracy.marked)} +- {(high - low) / 2:.1f}"


def _star(marked: Collection[str]) -> str:
    return "*" if marked else ""


def _pairing_part(pairing: Pairing, comparison: Comparison) -> list[str]:
    runs = {run.label: run for run in comparison.runs}
    first, other = runs[pairing.first], runs[pairing.other]
    lines = []
    for column in in_order([*pairing.differences, *pairing.refused]):
        marked = first.accuracies[column].marked + other.accuracies[column].marked
        name = heading(column) + _star(marked)
        if column in pairing.refused:
            lines.append([name, f"not paired: {pairing.refused[column]}", *["-"] * 6])
        else:
            lines.append([name, *_difference_cells(pairing.differences[column])])
    header = ["", "points", "95 % interval", "items"]
    header += [f"only {first.label} right", f"only {other.label} right", "p", "p (Holm)"]
    return [
        "",
        f"## {other.label} less {first.label}, over the same items",
        "",
        markdown_table([header, *lines]),
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
    counts = difference.counts
    if counts is None or difference.p is None or difference.p_holm is None:
        return [*cells, "-", "-", "-", "-", "-"]
    numbers = map(str, (counts.n, counts.only_first, counts.only_other))
    return [*cells, *numbers, _p_cell(difference.p), _p_cell(difference.p_holm)]


def _p_cell(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _reported_part(comparison: Comparison) -> list[str]:
    against = comparison.against_reported
    columns = in_order(line.column for line in against)
    lines = []
    for row, run in itertools.product(comparison.reported, comparison.runs):
        found = {x.column: x for x in against if (x.row, x.run) == (row.name, run.label)}
        cells = [_against_cell(found[c]) if c in found else "-" for c in columns]
        lines.append([f"{run.label} less reported: {row.name}", run.prompts, *cells])
    return [
        "",
        "## Points above the reported numbers",
        "",
        markdown_table([["", "prompts", *map(heading, columns)], *lines]),
        "",
        "in, out: the reported number lies in or out of the 95 % interval of ours, which is of our "
        f"number alone; the reported one has an error of its own. {_STAR}",
    ]


def _against_cell(line: AgainstReported) -> str:
    return f"{_points(line.points)}{_star(line.marked)} {'in' if line.inside else 'out'}"


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # never -0.0


def draw(comparison: Comparison, path: Path) -> None:
    """Draw accuracies with their intervals by column; reported ones are hollow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs, rows = comparison.runs, comparison.reported
    columns = in_order(column for run in runs for column in run.accuracies)
    figure, axes = pyplot.subplots(figsize=(4 + 0.75 * len(columns), 4), layout="constrained")
    for number, run in enumerate(runs):
        found = [column for column in columns if column in run.accuracies]
        points = [run.accuracies[column] for column in found]
        values = np.array([point.exact for point in points])
        bars = np.abs(np.array([point.interval for point in points]).T - values)
        at = np.array([columns.index(column) for column in found]) + _offset(number, comparison)
        label = f"{run.label} (prompts: {run.prompts})"
        axes.errorbar(at, values, bars, label=label, capsize=2, **_style(number))
    for number, row in enumerate(rows, len(runs)):
        found = [column for column in columns if column in row.values]
        at = np.array([columns.index(column) for column in found]) + _offset(number, comparison)
        values = np.array([row.values[column] for column in found])
        label, style = f"reported: {row.name}", _style(number)
        axes.errorbar(at, values, label=label, markerfacecolor="none", **style)
    marked = {c: m for run in runs for c, point in run.accuracies.items() if (m := point.marked)}
    names = [heading(column) + _star(marked.get(column, ())) for column in columns]
    lines = [name.replace("w/o ", "w/o\n").replace(", ", ",\n") for name in names]
    axes.set_xticks(range(len(columns)), lines, fontsize=8)
    axes.set(ylabel="accuracy (%)", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    note = f"\n*: {', '.join(sorted({w for m in marked.values() for w in m}))}" if marked else ""
    graders = ", ".join(dict.fromkeys(run.grader for run in runs))
    axes.set_title(f"bars: 95 % intervals; verdicts of {graders}{note}", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _offset(number: int, comparison: Comparison) -> float:
    """How far the marks of a run or row stand from the middle of a column, in columns."""
    count = len(comparison.runs) + len(comparison.reported)
    return 0.6 * ((number + 0.5) / count - 0.5)


def _style(number: int) -> dict[str, Any]:
    marker, shade = MARKERS[number % len(MARKERS)], SHADES[number % len(SHADES)]
    return {"marker": marker, "color": shade, "linestyle": "none"}


def write(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.json`, `comparison.md` and `comparison.png`."""
    text = json.dumps(asdict(comparison), indent=2, default=os.fspath)
    write_text(directory / "comparison.json", text + "\n")
    write_text(directory / "comparison.md", markdown(comparison))
    draw(comparison, directory / "comparison.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Compare from the command line and return the exit status: 0, or 2 for a wrong argument."""
    arguments = _parser().parse_args(argv)
    try:
        output = _figures(arguments) if arguments.figure else _tables(arguments)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"vocagnolm compare: error: {' '.join(str(error).split())}\n")
        return 2
    sys.stdout.write(output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vocagnolm compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="An evaluation, or a model that has one; for figures also a run of train.py, an audit "
        "or an inspection.",
    )
    add(
        "--reported",
        action="append",
        default=[],
        metavar="NAME",
        help="A row of the paper; again for more.",
    )
    add(
        "--output_dir",
        type=Path,
        help="Gets comparison.json, comparison.md and comparison.png, or the figures.",
    )
    add(
        "--figure",
        action="append",
        type=int,
        choices=NUMBERS,
        metavar="N",
        help=f"Draw this figure of the paper ({', '.join(map(str, NUMBERS))}); again for more.",
    )
    add(
        "--metric",
        help="Quality in a figure: gsm8k, AVG or another column of the evaluation, or eval_loss, "
        "the held-out loss after the last step; by default the paper's column.",
    )
    add("--resamples", type=int, default=RESAMPLES, help="Of the paired bootstrap.")
    add("--seed", type=int, default=SEED, help="Of the paired bootstrap.")
    return parser


def _tables(arguments: argparse.Namespace) -> str:
    """The comparison as text, after its files are written."""
    if arguments.metric:
        raise ValueError(
            "expected --figure with --metric, found none: name a figure or leave it out"
        )
    if arguments.output_dir:
        check_writable(arguments.output_dir)
    comparison = compare(arguments.runs, arguments.reported, arguments.resamples, arguments.seed)
    if arguments.output_dir:
        write(comparison, arguments.output_dir)
    return markdown(comparison)


def _figures(arguments: argparse.Namespace) -> str:
    """The names of the figures, after they are drawn."""
    if not arguments.output_dir:
        raise ValueError("expected --output_dir with --figure, found none: say where they shall be")
    check_writable(arguments.output_dir)
    for name, default in (("resamples", RESAMPLES), ("seed", SEED)):
        if getattr(arguments, name) != default:
            raise ValueError(
                f"expected --{name} for tables only, found it with --figure: leave it out"
            )
    images = make(
        arguments.figure,
        arguments.runs,
        arguments.output_dir,
        arguments.metric,
        arguments.reported,
    )
    return "".join(f"{path}\n" for path in images)
