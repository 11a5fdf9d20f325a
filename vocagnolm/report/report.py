"""A comparison as tables for a terminal, as files, and as one page with its curves and bars."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from vocagnolm.host.cards import public_name
from vocagnolm.io import markdown_table, write_text
from vocagnolm.report.compare import Comparison
from vocagnolm.report.curves import curve_panels
from vocagnolm.report.figures import methods_figure
from vocagnolm.report.frame import (
    differing,
    label_of,
    labels_of,
    option_of,
    setting_text,
    settings,
    trained,
)
from vocagnolm.report.pages import render_page
from vocagnolm.report.paired import Pairing
from vocagnolm.report.panels import Figure, Panel, draw_figure, draw_svg
from vocagnolm.report.plots import COLORS
from vocagnolm.report.runs import EVAL_LOSS, TEXTS, heading, in_order, read_state

# Of a log.
_LOGGED = ["tokens_per_s", "train_runtime"]
# As `plots.DASHES`.
_SVG_DASHES = ("none", "6 3", "1.5 2.5", "7 2 1.5 2")
# Columns that bars of a page are drawn in one picture for.
_IN_A_ROW = 4

Cells = Mapping[tuple[str, str], str]
_Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A titled table, the first of its rows the header, and what has to be known to read it."""

    title: str
    rows: _Rows
    notes: Sequence[str] = ()


# -- Tables ----------------------------------------------------------------------------------


def comparison_markdown(comparison: Comparison) -> str:
    """Lay out the comparison as tables."""
    parts = []
    for section in _sections(comparison):
        parts += [f"## {section.title}", "", markdown_table(section.rows), ""]
        for note in section.notes:
            # Items of a list stand close.
            parts += [note] if note.lstrip().startswith("- ") else [note, ""]
        if parts[-1]:
            parts.append("")
    return "\n".join(parts[:-1]) + "\n"


def _sections(comparison: Comparison) -> list[Section]:
    parts = [_accuracies, _second_opinions, _pairings]
    parts += [_against_reported, _differing_settings, _costs]
    return [section for part in parts for section in part(comparison)]


def _accuracies(comparison: Comparison) -> Iterator[Section]:
    if not comparison.runs:
        return
    cells = _cells(comparison.verdicts)
    heads = {run.label: [run.label, run.prompts] for run in comparison.runs}
    # Reported rows stand below ours, in the same columns.
    for x in comparison.reported.itertuples():
        title = f"reported: {x.row} ({x.table})"
        cells[title, x.column], heads[title] = f"{x.reported:.1f}", [title, "paper"]
    notes = [_note("accuracies", "star")]
    for run in comparison.runs:
        name, revision = run.model.rsplit(", revision ", 1)
        # As much of a hash as tells it apart.
        model = f"{public_name(name)}, revision {revision[:19]}"
        notes.append(f"- {run.label}: {model}; verdicts of {run.grader}")
        notes += [f"  - {note}" for note in run.notes]
    if len(comparison.reported):
        notes.append(f"- reported: as printed in {comparison.source}")
    yield Section("Accuracy (%)", _table(["run", "prompts"], heads, cells), notes)


def _second_opinions(comparison: Comparison) -> Iterator[Section]:
    """Lay out the second opinion apart: no number of it may stand beside a verdict."""
    cells = _cells(comparison.scores[comparison.scores.second])
    judged = [run for run in comparison.runs if run.label in {label for label, _ in cells}]
    heads = {run.label: [run.label, run.second_opinion, run.prompts] for run in judged}
    if heads:
        rows = _table(["run", "grader", "prompts"], heads, cells)
        yield Section("Accuracy (%), second opinion", rows)


def _differing_settings(comparison: Comparison) -> Iterator[Section]:
    several = settings(trained(comparison.frame))
    options = [setting.options.iloc[0] for setting in several]
    rows = [["option", *labels_of(several)]]
    rows += [
        [name, *(setting_text(one.get(name)) for one in options)] for name in differing(several)
    ]
    if len(rows) > 1:
        yield Section("Settings that differ", rows)


def _costs(comparison: Comparison) -> Iterator[Section]:
    rows = [["run", "trained as", "seed", "steps", "student tokens", "held-out loss"]]
    rows[0] += ["tokens/s", "hours", "FLOPs of the student"]
    for run, of_run in trained(comparison.frame).groupby("run", sort=False):
        batch, state = option_of(of_run.iloc[0], "global_batch_tokens"), read_state(Path(str(run)))
        log = pd.DataFrame(state.get("log_history", []), columns=_LOGGED)
        steps = state.get("global_step", 0)
        loss = of_run.value[of_run.column == EVAL_LOSS]
        name = label_of(of_run)
        row = [comparison.labels[str(run)], name, str(json.loads(of_run.seed.iloc[0])[0])]
        row += [f"{steps:,}", f"{steps * batch:,}"]
        row += [
            f"{x:{form}}" if pd.notna(x) else "-"
            for x, form in (
                (loss.mean(), ".4f"),
                (log.tokens_per_s.median(), ",.0f"),
                (log.train_runtime.max() / 3600, ",.2f"),
                (state.get("total_flos") or float("nan"), ".3g"),
            )
        ]
        rows.append(row)
    if len(rows) > 1:
        yield Section("Cost", rows, [_note("costs")])


def _table(titles: Sequence[str], heads: Mapping[str, Sequence[str]], cells: Cells) -> _Rows:
    """Lay out cells by row and column, below the columns that any row has."""
    columns = in_order(column for _, column in cells)
    rows = [[*titles, *map(heading, columns)]]
    rows += [[*head, *(cells.get((key, c), "-") for c in columns)] for key, head in heads.items()]
    return rows


def _cells(scores: pd.DataFrame) -> dict[tuple[str, str], str]:
    return {
        (x.run, x.column): f"{x.rounded:.1f}{_star(x.marked)} +- {(x.high - x.low) / 2:.1f}"
        for x in scores.itertuples()
    }


def _star(marked: object) -> str:
    return "*" if marked else ""


def _note(*names: str) -> str:
    return " ".join(TEXTS["notes"][name] for name in names)


def _pairings(comparison: Comparison) -> Iterator[Section]:
    note = _note("pairings", "star").format(**vars(comparison))
    for first in dict.fromkeys(pairing.first for pairing in comparison.pairings):
        rows = [["run", "benchmark", "points", "95 % interval", "items"]]
        rows[0] += [f"only {first} right", "only the run right", "p", "p (Holm)"]
        for pairing in comparison.pairings:
            if pairing.first == first:
                rows += _pairing(pairing, comparison.verdicts)
        yield Section(f"Points above {first}, over the same items", rows, [note])


def _pairing(pairing: Pairing, scores: pd.DataFrame) -> list[list[str]]:
    is_marked = scores.run.isin([pairing.first, pairing.other]) & scores.marked.map(bool)
    starred = set(scores.column[is_marked])
    rows = []
    for column in in_order([*pairing.differences, *pairing.refused]):
        name = [pairing.other, heading(column) + _star(column in starred)]
        if column in pairing.refused:
            rows.append([*name, f"not paired: {pairing.refused[column]}", *["-"] * 6])
            continue
        found = pairing.differences[column]
        cells = [*name, _points(found.points), " to ".join(map(_points, found.interval))]
        cells += [str(x) for x in asdict(found.counts).values()] if found.counts else ["-"] * 3
        rows.append(cells + [_p_value(p) for p in (found.p, found.p_holm)])
    return rows


def _p_value(p: float | None) -> str:
    if p is None:
        return "-"
    return f"{p:.3f}" if p >= 0.001 else "< 0.001"


def _against_reported(comparison: Comparison) -> Iterator[Section]:
    if comparison.against_reported.empty:
        return
    cells = {
        (f"{x.run} less reported: {x.row}", x.column): (
            f"{_points(x.points)}{_star(x.marked)} {'in' if x.inside else 'out'}"
        )
        for x in comparison.against_reported.itertuples()
    }
    heads = {}
    for row in dict.fromkeys(comparison.reported.row):
        for run in comparison.runs:
            title = f"{run.label} less reported: {row}"
            heads[title] = [title, run.prompts]
    rows = _table(["", "prompts"], heads, cells)
    yield Section("Points above the reported numbers", rows, [_note("reported", "star")])


def _points(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f}"  # never -0.0


# -- Pictures --------------------------------------------------------------------------------


def _bars(comparison: Comparison) -> Figure:
    """Plan the accuracies with their intervals; those of the paper are hollow."""
    names = list(dict.fromkeys(comparison.reported.row))
    panels = methods_figure(comparison.frame, "", names, leaves_out=True).panels
    graders = ", ".join(dict.fromkeys(run.grader for run in comparison.runs))
    return Figure(0, f"Accuracies; verdicts of {graders}", panels)


def _in_rows(panel: Panel) -> list[Panel]:
    """Split bars into pictures of a few columns, which fit on a phone."""
    top = max((mark.bar[1] if mark.bar else mark.y for mark in panel.marks), default=1.0)
    rows = [panel.columns[at : at + _IN_A_ROW] for at in range(0, len(panel.columns), _IN_A_ROW)]
    return [
        replace(panel, columns=row, top=top, marks=[mark for mark in panel.marks if mark.x in row])
        for row in rows
    ]


def _keys(panels: Sequence[Panel]) -> list[dict[str, object]]:
    """List the legend of some pictures."""
    marks = {mark.label: mark for panel in panels for mark in panel.marks if mark.label}
    return [
        {
            "label": label,
            "color": f"var(--series-{mark.style % len(COLORS)})",
            "dashes": _SVG_DASHES[mark.style % len(_SVG_DASHES)],
            "is_bar": panels[0].bars,
            "is_hollow": mark.reported,
        }
        for label, mark in marks.items()
    ]


def comparison_html(comparison: Comparison) -> str:
    """Draw the comparison as a page of its own, which loads nothing."""
    several = settings(trained(comparison.frame))
    curves = curve_panels(several, labels_of(several))
    pictures = []
    if comparison.runs:
        figure = _bars(comparison)
        pictures.append(("Accuracy", _in_rows(figure.panels[0]), figure.notes()))
    if curves:
        pictures.append(("Along the training", curves, [_note("curves")]))
    return render_page(
        "comparison.html",
        names=list(dict.fromkeys(comparison.labels.values())),
        baseline=", ".join(dict.fromkeys(each.first for each in comparison.pairings)),
        pictures=[
            (title, _keys(panels), [(panel.y_label, draw_svg(panel)) for panel in panels], notes)
            for title, panels, notes in pictures
        ],
        sections=_sections(comparison),
    )


# -- Files -----------------------------------------------------------------------------------


def write_comparison(comparison: Comparison, directory: Path) -> None:
    """Write `comparison.html`, `.md`, `.json` and, of what has accuracies, `.png`."""
    content = asdict(comparison) | {
        name: frame.to_dict("records")
        for name, frame in vars(comparison).items()
        if isinstance(frame, pd.DataFrame)
    }
    # All numbers of the runs are in the frames.
    del content["frame"]
    for run in content["runs"]:
        del run["scores"]
    text = json.dumps(content, indent=2, default=str)
    write_text(directory / "comparison.json", text + "\n")
    write_text(directory / "comparison.md", comparison_markdown(comparison))
    write_text(directory / "comparison.html", comparison_html(comparison))
    if comparison.runs:
        draw_figure(_bars(comparison), directory / "comparison.png")
