"""The paper's figures from runs of ours, as PNG, as PDF and, with all that they show, as JSON.

Figure 8 is the guidance page of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from vocagnolm.io import write_json
from vocagnolm.report.frame import (
    METHOD_LABELS,
    average_setting,
    labels_of,
    marks,
    option_of,
    read_frame,
    settings,
    trained,
)
from vocagnolm.report.page import write_view
from vocagnolm.report.panels import (
    TOKEN_LEVEL,
    Figure,
    Mark,
    Panel,
    draw_figure,
    line,
    name_once,
    overlap_panels,
)
from vocagnolm.report.paper import paper_models, read_reported
from vocagnolm.report.runs import EVAL_LOSS, find_views, heading, in_order, reject, run_directory
from vocagnolm.report.view import read_views

if TYPE_CHECKING:
    import pandas as pd

_TABLE_2, _TABLE_2_TEACHER, _GUIDANCE_PAGE = "Table 2", "Mistral-ProXMath", 8
_DEFAULT_METRICS = {1: "AVG", 5: "AVG", 6: "AVG w/o SAT", 7: "AVG w/o SAT"}
_STYLES = {label: number for number, label in enumerate(METHOD_LABELS.values())}
_QUALITY = "evaluate_math.py, or give --reported NAME if the paper has it"
_AUDIT = "vocagnolm audit --student S --teacher T --dataset D --output_dir audits/T"
_VIEWS = "vocagnolm inspect --output_dir D, or train.py --guidance_table_steps 100"

# Rows of the paper by name: their numbers by column.
_Rows = Mapping[str, Mapping[str, float]]


def make(
    numbers: Sequence[int],
    paths: Sequence[Path],
    directory: Path,
    metric: str | None = None,
    reported: Sequence[str] = (),
) -> list[Path]:
    """Draw figures of the paper into a directory, and return the images and pages.

    The paths lead to runs, evaluations, audits and inspections; the metric is a column of the
    evaluation or "eval_loss", by default the paper's column; rows of the paper are drawn beside.

    Raises:
        ValueError: a figure lacks something, or an option does not apply to it.
    """
    frame = read_frame(paths)
    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for number in dict.fromkeys(numbers):
        figure = f"--figure {number}"
        if metric and number in (3, _GUIDANCE_PAGE):
            reject("--metric for a figure of quality", figure, "leave it out")
        if reported and number in (3, 7, _GUIDANCE_PAGE):
            expected = "--reported for a figure whose numbers the paper prints"
            reject(expected, figure, "leave it out")
        if number == _GUIDANCE_PAGE:
            made += _write_pages(paths, directory)
            continue
        plan = _PLANS[number](frame, metric or _DEFAULT_METRICS.get(number, ""), reported)
        path = directory / f"figure-{number}.png"
        write_json(path.with_suffix(".json"), plan.content())
        draw_figure(plan, path, ".pdf")
        made.append(path)
    return made


def _write_pages(paths: Sequence[Path], directory: Path) -> list[Path]:
    """Write Figure 8: a page for each source that has views."""
    found = [views for path in paths if (views := find_views(run_directory(path)))]
    if not found:
        _miss(8, "guidance.json or guidance/step-*.json", _VIEWS)
    names = ["figure-8", *(f"figure-8-{number}" for number in range(2, len(found) + 1))]
    for name, views in zip(names, found, strict=True):
        write_view(read_views(views), directory, name)
    return [directory / f"{name}.html" for name in names]


def _miss(number: int, missing: str, example: str) -> NoReturn:
    reject(f"{missing} for --figure {number}", "none", f"make some with {example}")


def _runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Select the runs of train.py, and behind them other evaluations."""
    runs = frame[frame.source != "audit"]
    return runs.sort_values("source", ascending=False, kind="stable")


def _models(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Find who may be a teacher: every run and evaluation by the name a teacher would have."""
    runs = _runs(frame)
    # Of one name the last counts: an evaluation before a run of ours.
    last = dict(zip(runs.model, runs.run, strict=True))
    return {name: runs[runs.run == run] for name, run in last.items()}


def _audits(frame: pd.DataFrame, number: int) -> pd.DataFrame:
    audits = frame[frame.source == "audit"]
    if audits.empty:
        _miss(number, "an audit of the teachers", _AUDIT)
    return audits


def _paper(reported: Sequence[str], metric: str = "") -> dict[str, dict[str, float]]:
    """Read rows of the paper; a whole table stands for its rows that have the metric."""
    rows = read_reported(reported)[1].groupby("row", sort=False)
    found = {name: dict(zip(row.column, row.reported, strict=True)) for name, row in rows}
    return {x: row for x, row in found.items() if not metric or metric in row or x in reported}


def _printed(rows: _Rows, name: str, metric: str) -> float:
    """Read a number of the paper, or list those that its row has."""
    if metric not in rows[name]:
        expected = f"{metric!r} in the reported row {name!r}"
        reject(expected, ", ".join(map(repr, rows[name])), "name one of them with --metric")
    return rows[name][metric]


def _check_named(rows: Iterable[str], known: Sequence[str], expected: str, those: str) -> None:
    """Reject reported rows that name nobody in the figure."""
    if unused := [name for name in rows if name not in known]:
        found = f"{unused[0]!r} and {those} {', '.join(known)}"
        reject(f"--reported to name {expected}", found, "leave it out")


def _metric_label(metric: str) -> str:
    loss = "held-out loss (nats per token)"
    return loss if metric == EVAL_LOSS else f"accuracy, {heading(metric)} (%)"


def _level(frame: pd.DataFrame, metric: str, style: int) -> list[Mark]:
    """Return the level of continual pretraining, if there is such a run."""
    found = marks(trained(frame, "cpt"), metric, lambda row: 0.0)
    return line([replace(mark, x=None) for mark in found], METHOD_LABELS["cpt"], style)


def _vocabulary(frame: pd.DataFrame, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 1."""
    audits, models, rows = _audits(frame, 1), _models(frame), _paper(reported, metric)
    audited = list(dict.fromkeys(audits.teacher))
    _check_named(rows, audited, "an audited teacher for --figure 1", "audits of")
    for name in audited:
        if name not in models and name not in rows:
            _miss(1, f"the quality of {name}", _QUALITY)
    # The paper compares strings as they are written; decoded bytes do not depend on the family.
    panels = []
    for kind, how in (("raw", "strings, as in the paper"), ("bytes", "decoded bytes")):
        of_kind = audits[audits.column == kind]
        shares = dict(zip(of_kind.teacher, of_kind.value, strict=True))
        ours = [average_setting(models[x], metric, shares[x], x) for x in audited if x in models]
        theirs = [Mark(shares[x], _printed(rows, x, metric), text=x) for x in rows]
        both = line(ours, "teachers, evaluated", 0, joined=False)
        both += line(theirs, "teachers, reported", 0, joined=False, reported=True)
        label = f"teacher's words that are the student's too (%)\ncompared as {how}"
        panels.append(Panel(label, _metric_label(metric), both))
    return Figure(1, "Vocabulary overlap and quality of the teachers", panels)


def _chunks(frame: pd.DataFrame, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 3."""
    audits = _audits(frame, 3)
    where = set(audits.dataset)
    labels = audits.teacher + ", " + audits.dataset if len(where) > 1 else audits.teacher
    audits = audits.assign(label=labels)
    if twice := audits.label[audits.duplicated(["label", "column", "chunks"])].tolist():
        reject(f"one audit of {twice[0]}", "two", "leave one out")
    # The paper draws no intervals.
    panels = overlap_panels(audits.assign(low=math.nan))
    place = "several corpora" if len(where) > 1 else where.pop()
    return Figure(3, f"Overlap of the student's and the teacher's chunks on {place}", panels)


def methods_figure(
    frame: pd.DataFrame, metric: str, reported: Sequence[str], *, leaves_out: bool = False
) -> Figure:
    """Plan Figure 4: the accuracies of settings and models, or another metric of theirs.

    What has none is refused, with what to do, or else left out.
    """
    runs, rows = _runs(frame), _paper(reported, metric)
    if runs.empty and not rows:
        how = "train.py --method cpt, uld and vocagnolm, and evaluate_math.py, or give --reported"
        _miss(4, "runs", how)
    several = settings(runs)
    labels = labels_of(several)
    evaluated = in_order(set(runs.column.dropna()) - {EVAL_LOSS})
    if runs.empty:
        evaluated = in_order(column for row in rows.values() for column in row)
    # Without a column the first average is asked for, which says how to evaluate.
    columns = [metric] if metric else evaluated or [_DEFAULT_METRICS[6]]
    names = {c: "held-out loss" if c == EVAL_LOSS else heading(c) for c in columns}
    found: list[Mark] = []
    for style, (label, setting) in enumerate(zip(labels, several, strict=True)):
        # A column counts if each run of the setting has it; with none, the first says what to do.
        have = setting.column.value_counts()
        held = [c for c in columns if have.get(c, 0) == setting.run.nunique()]
        held = held or columns[: not leaves_out]
        points = [average_setting(setting, column, names[column]) for column in held]
        found += line(points, label, style, joined=False)
    for style, name in enumerate(rows, len(labels)):
        held = [column for column in columns if column in rows[name]] or columns[:1]
        points = [Mark(names[column], _printed(rows, name, column)) for column in held]
        found += line(points, f"reported: {name}", style, joined=False, reported=True)
    y_label = _metric_label(metric) if metric else "accuracy (%)"
    # Losses have no zero to stand on.
    bars = metric != EVAL_LOSS
    return Figure(4, "Methods compared", [Panel("", y_label, found, list(names.values()), bars)])


def _teachers(frame: pd.DataFrame, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 5."""
    guided, rows = trained(frame), _paper(reported, metric)
    guided = guided[guided.teacher != ""]
    # A reported student is named by its teacher and its method, a model by its name alone.
    models = {name: row for name, row in rows.items() if name in paper_models()}
    parts = {name: name.rpartition(" ") for name in rows}
    students = {name: x for name, x in parts.items() if x[0] and x[2] in _STYLES}
    if guided.empty and not students:
        _miss(5, "runs with a teacher", "train.py --teacher T, or give --reported 'Table 1'")
    teachers = sorted(set(guided.teacher))
    placed = [*teachers, *(teacher for teacher, _, _ in students.values())]
    # Students of nobody, as TinyLlama-CPT and Rho-1, are levels.
    expected = "a teacher or a guided student for --figure 5"
    levels = [name for name in rows if " " not in name and name not in models]
    _check_named({*rows} - {*students, *levels}, placed, expected, "teachers")
    # The quality of its teacher is the place of a student; a place is named once.
    qualities = _teacher_qualities(frame, metric, teachers, models)
    names: dict[object, str] = {quality: name for name, quality in qualities.items()}
    found: list[Mark] = []
    for method, runs in guided.groupby("method", sort=False):
        points = marks(runs, metric, lambda row: qualities[row.teacher])
        found += line(points, method, _STYLES[method])
    found += _level(frame, metric, _STYLES[METHOD_LABELS["cpt"]])
    for name, (teacher, _, method) in students.items():
        quality = _printed(_paper([teacher]), teacher, metric)
        if teacher not in qualities:
            names[quality] = teacher
        point, label = Mark(quality, _printed(rows, name, metric)), f"reported: {method}"
        found += line([point], label, _STYLES[method], joined=False, reported=True)
    for style, name in enumerate(levels, 4):
        level = Mark(None, _printed(rows, name, metric))
        found += line([level], f"reported: {name}", style, reported=True)
    whose = "teacher" if teachers and not models else "teacher, as reported"
    unit = _metric_label(metric)
    panel = Panel(f"{whose}: {unit}", f"student: {unit}", name_once(found, names))
    return Figure(5, "Students and their teachers", [panel])


def _teacher_qualities(
    frame: pd.DataFrame, metric: str, teachers: Sequence[str], rows: _Rows
) -> dict[str, float]:
    """Find where the teachers stand, all of them measured or all reported."""
    models, qualities = _models(frame), {}
    for name in teachers:
        if name in rows:
            qualities[name] = _printed(rows, name, metric)
        elif rows:
            expected = "--reported for all teachers or for none"
            reject(expected, f"none for {name}", "name it too, or evaluate all of them")
        elif name not in models:
            _miss(5, f"the quality of {name}", _QUALITY)
        else:
            qualities[name] = average_setting(models[name], metric).y
    return qualities


def _alignment(frame: pd.DataFrame, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 6."""
    if others := [repr(name) for name in reported if name != _TABLE_2]:
        expected = f"no --reported but {_TABLE_2!r} for --figure 6"
        reject(expected, ", ".join(others), "leave the rest out")
    chunked, tokens = trained(frame, "chunk"), trained(frame, "vocagnolm")
    guidance = [option_of(run, "chunk_guidance") for run in chunked.itertuples()]
    chunked = chunked.assign(how=guidance)
    guided, chosen = chunked[chunked.how != "random"], chunked[chunked.how == "random"]
    if guided.empty and tokens.empty and not reported:
        _miss(6, "runs guided by chunks or tokens", "train.py --method chunk --chunks 8 (to 64)")
    whose = [_TABLE_2_TEACHER] if reported else []
    teachers = sorted({*guided.teacher, *tokens.teacher, *whose} - {""})
    audit = _audit_of(teachers, frame)
    # Number of chunks, 0 for the token level, stands for x until the overlap replaces it.
    lines = []
    by_label = {"the teacher's chunks": guided, "random chunks": chosen, TOKEN_LEVEL: tokens}
    for style, (label, runs) in enumerate(by_label.items()):
        points = marks(runs, metric, lambda row: int(row.chunks))
        lines += line(points, label, style, joined=label != TOKEN_LEVEL)
    if reported:
        lines += _table_2(metric)
    panels = []
    for name, column in (("IoU", "iou"), ("IoS", "ios")):
        # By number of chunks, 0 for the token level.
        overlap = audit[audit.column == column].astype({"chunks": int}).set_index("chunks").value
        if missing := [mark.x for mark in lines if mark.x not in overlap]:
            expected = f"the audit of {teachers[0]} to have {missing[0]} chunks"
            known = ", ".join(str(count) for count in overlap if count)
            reject(expected, known, f"audit again with --chunks {missing[0]}")
        moved = [replace(mark, x=overlap[mark.x]) for mark in lines]
        names: dict[object, str] = {x: str(count) for count, x in overlap.items() if count}
        label = f"{name} of student's and teacher's characters (%)"
        panels.append(Panel(label, _metric_label(metric), name_once(moved, names)))
    place = f"{audit.teacher.iloc[0]}'s on {audit.dataset.iloc[0]}"
    return Figure(6, f"Quality by number of chunks against their overlap with {place}", panels)


def _audit_of(teachers: Sequence[str], frame: pd.DataFrame) -> pd.DataFrame:
    audits = frame[(frame.source == "audit") & frame.teacher.isin(teachers)]
    count, names = len(audits.drop_duplicates(["run", "teacher"])), ", ".join(teachers)
    if len(teachers) != 1 or count > 1:
        expected = "runs and one audit of one teacher for --figure 6"
        reject(expected, f"teachers {names} and {count} audits of them", "leave some out")
    if not count:
        _miss(6, f"an audit of {names}", f"{_AUDIT} --chunks 8 16 32 64")
    return audits


def _table_2(metric: str) -> list[Mark]:
    found: list[Mark] = []
    styles = {"teacher": (0, "the teacher's chunks"), "random": (1, "random chunks")}
    for name, row in _paper([_TABLE_2]).items():
        # As "8 chunks, teacher"; the last row is the token level.
        chunks, how = name.split(", ")
        style, label = styles[how] if chunks != TOKEN_LEVEL else (2, TOKEN_LEVEL)
        count = 0 if chunks == TOKEN_LEVEL else int(chunks.split()[0])
        point = [Mark(count, _printed({name: row}, name, metric))]
        joined = chunks != TOKEN_LEVEL
        found += line(point, f"reported: {label}", style, joined=joined, reported=True)
    return found


def _sweeps(frame: pd.DataFrame, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 7."""
    panels = []
    for method, option, scale, x_label in (
        ("vocagnolm", "top_k", 100, "share of the tokens trained, top_k (%)"),
        ("uld", "uld_weight", 1, "weight of the distance, lambda"),
    ):
        # A panel needs at least two values of its option.
        runs = trained(frame, method)
        runs = runs.assign(x=[scale * float(option_of(run, option)) for run in runs.itertuples()])
        if runs.x.nunique() < 2:
            continue
        found: list[Mark] = []
        by_teacher = runs[runs.teacher != ""].groupby("teacher")
        for style, (teacher, of_one) in enumerate(by_teacher):
            found += line(marks(of_one, metric, lambda row: row.x), teacher, style)
        found += _level(frame, metric, len(by_teacher))
        panels.append(Panel(f"{METHOD_LABELS[method]}: {x_label}", _metric_label(metric), found))
    if not panels:
        _miss(7, "runs that differ in top_k or uld_weight", "recipes/ablations/top_k-*.yaml")
    return Figure(7, "Sweeps of top_k and lambda", panels)


# The figures that are plots, by their number in the paper.
_PLANS: Mapping[int, Callable[[pd.DataFrame, str, Sequence[str]], Figure]] = {
    1: _vocabulary,
    3: _chunks,
    4: methods_figure,
    5: _teachers,
    6: _alignment,
    7: _sweeps,
}
NUMBERS = (*_PLANS, _GUIDANCE_PAGE)
