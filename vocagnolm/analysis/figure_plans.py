"""What each of the paper's figures shows, and what it needs for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from vocagnolm.analysis.figure_data import (
    METHODS,
    Audited,
    Sources,
    Trained,
    column_label,
    evaluated_columns,
    measure,
    measured_models,
    metric_label,
    paper_guidance,
    reported_rows,
    reported_value,
)
from vocagnolm.analysis.figure_panels import (
    Figure,
    Line,
    Panel,
    Point,
    by_teacher,
    labels_of,
    level,
    mark,
    marks,
    settings_of,
)
from vocagnolm.analysis.runs import ReportedRow, Run

TABLE_2 = "Table 2"
TOKEN_LEVEL = "token level"
_DEFAULT_METRICS = {1: "AVG", 5: "AVG", 6: "AVG w/o SAT", 7: "AVG w/o SAT"}
_STYLES = {label: number for number, label in enumerate(METHODS.values())}
_QUALITY = "evaluate_math.py, or give --reported NAME if the paper has it"
_AUDIT = "vocagnolm audit --student S --teacher T --dataset D --output_dir audits/T"


def plan(
    number: int, sources: Sources, metric: str | None = None, reported: Sequence[str] = ()
) -> Figure:
    """Say what a figure shows.

    Args:
        number: as in the paper; one of `PLANS`.
        sources: what there is to draw from.
        metric: quality of a model: a column of the evaluation, or "eval_loss"; None: the paper's.
        reported: names of rows of the paper, which are drawn beside.

    Raises:
        ValueError: what it needs is missing, or an option does not apply.
    """
    if metric and number == 3:
        raise ValueError(
            "expected --metric for a figure of quality, found --figure 3: leave it out"
        )
    if reported and number in (3, 7):
        raise ValueError(
            f"expected --reported for a figure whose numbers the paper prints, found --figure "
            f"{number}: leave it out"
        )
    return PLANS[number](sources, metric or _DEFAULT_METRICS.get(number), reported)


def _miss(number: int, what: str, example: str) -> NoReturn:
    raise ValueError(f"expected {what} for --figure {number}, found none: make some with {example}")


def _vocabulary(sources: Sources, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 1."""
    audited = {audit.teacher: audit for audit in sources.audited}
    if not audited:
        _miss(1, "an audit of the teachers", _AUDIT)
    models, rows = measured_models(sources), {row.name: row for row in reported_rows(reported)}
    if unused := [name for name in rows if name not in audited]:
        raise ValueError(
            f"expected --reported to name an audited teacher for --figure 1, found {unused[0]!r} "
            f"and audits of {', '.join(audited)}: leave it out"
        )
    for name in audited:
        if name not in models and name not in rows:
            _miss(
                1,
                f"the quality of {name}",
                _QUALITY,
            )
    panels = []
    for kind, what in (("raw", "strings, as in the paper"), ("bytes", "decoded bytes")):
        shares = {name: 100 * audit.vocabulary[kind] for name, audit in audited.items()}
        ours = [mark([models[x]], shares[x], metric, x) for x in audited if x in models]
        theirs = [Point(shares[x], reported_value(row, metric), text=x) for x, row in rows.items()]
        lines = [
            Line("teachers, evaluated", ours, 0, joined=False),
            Line("teachers, reported", theirs, 0, joined=False, reported=True),
        ]
        label = f"teacher's words that are the student's too (%)\ncompared as {what}"
        panels.append(Panel(label, metric_label(metric), [x for x in lines if x.points]))
    return Figure(1, "Vocabulary overlap and quality of the teachers", panels)


def _chunks(sources: Sources, metric: str | None, reported: Sequence[str]) -> Figure:
    """Figure 3."""
    if not sources.audited:
        _miss(3, "an audit of the teachers", _AUDIT)
    several = len({audit.dataset for audit in sources.audited}) > 1
    audits: dict[str, Audited] = {}
    for audit in sources.audited:
        label = f"{audit.teacher}, {audit.dataset}" if several else audit.teacher
        if label in audits:
            raise ValueError(f"expected one audit of {label}, found two: leave one out")
        audits[label] = audit
    counts = sorted({count for audit in audits.values() for count in audit.chunks})
    panels = []
    for which, what in enumerate(("IoU", "IoS")):
        lines = []
        for style, (label, audit) in enumerate(audits.items()):
            curve = [Point(str(n), 100 * audit.chunks[n][which]) for n in sorted(audit.chunks)]
            token = Point(TOKEN_LEVEL, 100 * audit.token_level[which])
            lines += [Line(label, curve, style), Line("", [token], style, joined=False)]
        columns = [*map(str, counts), TOKEN_LEVEL]
        panels.append(Panel("chunks of a sequence", f"{what} (% of characters)", lines, columns))
    where = "several corpora" if several else sources.audited[0].dataset
    return Figure(3, f"Overlap of the student's and the teacher's chunks on {where}", panels)


def _methods(sources: Sources, metric: str | None, reported: Sequence[str]) -> Figure:
    """Figure 4."""
    settings, rows = settings_of(sources.trained), reported_rows(reported)
    named: list[tuple[str, Sequence[Trained | Run]]] = [
        *zip(labels_of(settings), settings, strict=True),
        *((run.label, [run]) for run in sources.evaluated),
    ]
    if not named:
        _miss(4, "runs", "train.py --method cpt, uld and vocagnolm, and evaluate_math.py")
    runs = [run for _, setting in named for run in setting]
    columns = [metric] if metric else evaluated_columns(runs)
    if not columns:
        measure(runs[0], _DEFAULT_METRICS[6])  # raises, and says how to evaluate
    lines = []
    for style, (label, setting) in enumerate(named):
        held = [c for c in columns if metric or all(c in evaluated_columns([r]) for r in setting)]
        if not held:
            measure(setting[0], columns[0])
        points = [mark(setting, column_label(column), column) for column in held]
        lines.append(Line(label, points, style, joined=False))
    for style, row in enumerate(rows, len(lines)):
        held = [column for column in columns if column in row.values]
        points = [Point(column_label(c), reported_value(row, c)) for c in held or columns[:1]]
        lines.append(Line(f"reported: {row.name}", points, style, joined=False, reported=True))
    y_label = metric_label(metric) if metric else "accuracy (%)"
    panel = Panel("", y_label, lines, [column_label(column) for column in columns])
    return Figure(4, "Methods compared", [panel])


def _teachers(sources: Sources, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 5."""
    guided = [run for run in sources.trained if run.teacher]
    students, rows = _split_rows(reported_rows(reported))
    if not guided:
        _miss(5, "runs with a teacher", "train.py --teacher T")
    teachers = by_teacher(guided)
    if unused := [name for name in rows if name not in teachers]:
        raise ValueError(
            f"expected --reported to name a teacher or a guided student for --figure 5, found "
            f"{unused[0]!r} and teachers {', '.join(teachers)}: leave it out"
        )
    qualities, whose = _teacher_qualities(sources, metric, teachers, rows)
    lines = []
    for method in dict.fromkeys(METHODS[run.method] for run in guided):
        settings = settings_of(run for run in guided if METHODS[run.method] == method)
        points = marks(settings, lambda run: qualities[run.teacher or ""], metric)
        lines.append(Line(method, points, _STYLES[method]))
    lines += level(sources.trained, metric, _STYLES[METHODS["cpt"]])
    names = {quality: name for name, quality in qualities.items()}
    if students:
        theirs, their_names = _reported_students(students, metric)
        lines += theirs
        names |= {x: name for x, name in their_names.items() if name not in qualities}
    x_label = f"{whose}: {metric_label(metric)}"
    panel = Panel(x_label, f"student: {metric_label(metric)}", _named_once(lines, names))
    return Figure(5, "Students and their teachers", [panel])


def _reported_students(
    students: Mapping[tuple[str, str], ReportedRow], metric: str
) -> tuple[list[Line], dict[float, str]]:
    """Students as reported against their teachers as reported, and the teachers' names by place."""
    points: dict[str, list[Point]] = {}
    names = {}
    for (teacher, method), row in students.items():
        quality = reported_value(reported_rows([teacher])[0], metric)
        names[quality] = teacher
        points.setdefault(method, []).append(Point(quality, reported_value(row, metric)))
    lines = [
        Line(f"reported: {method}", found, _STYLES[method], joined=False, reported=True)
        for method, found in points.items()
    ]
    return lines, names


def _split_rows(
    rows: Iterable[ReportedRow],
) -> tuple[dict[tuple[str, str], ReportedRow], dict[str, ReportedRow]]:
    """Guided students by teacher and method, and the rest by name."""
    students, models = {}, {}
    for row in rows:
        teacher, _, method = row.name.rpartition(" ")
        if teacher:
            students[teacher, method] = row
        else:
            models[row.name] = row
    return students, models


def _teacher_qualities(
    sources: Sources, metric: str, teachers: Iterable[str], rows: Mapping[str, ReportedRow]
) -> tuple[dict[str, float], str]:
    """Where the teachers stand, all of them measured or all reported, and which of the two."""
    models = measured_models(sources)
    if not rows:
        for name in teachers:
            if name not in models:
                _miss(
                    5,
                    f"the quality of {name}",
                    _QUALITY,
                )
        return {name: measure(models[name], metric).value for name in teachers}, "teacher"
    if missing := [name for name in teachers if name not in rows]:
        raise ValueError(
            f"expected --reported for all teachers or for none, found none for {missing[0]}: "
            "name it too, or evaluate all of them"
        )
    return {name: reported_value(rows[name], metric) for name in teachers}, "teacher, as reported"


def _named_once(lines: Sequence[Line], names: Mapping[Any, str]) -> list[Line]:
    """Write the name of a place beside the highest of its marks."""
    tops: dict[Any, Point] = {}
    for point in (point for line in lines for point in line.points):
        if point.x not in tops or point.y > tops[point.x].y:
            tops[point.x] = point

    def named(point: Point) -> Point:
        is_top = point.x in names and point is tops[point.x]
        return replace(point, text=names[point.x]) if is_top else point

    return [replace(line, points=[named(point) for point in line.points]) for line in lines]


def _alignment(sources: Sources, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 6."""
    if set(reported) - {TABLE_2}:
        raise ValueError(
            f"expected no --reported but {TABLE_2!r} for --figure 6, found "
            f"{', '.join(map(repr, reported))}: leave the rest out"
        )
    chunked = [run for run in sources.trained if run.method == "chunk"]
    chosen = [run for run in chunked if run.settings["chunk_guidance"] == "random"]
    guided = [run for run in chunked if run not in chosen]
    tokens = [run for run in sources.trained if run.method == "vocagnolm"]
    if not (guided or tokens or reported):
        _miss(6, "runs guided by chunks or tokens", "train.py --method chunk --chunks 8 (to 64)")
    audit = _audit_of_one_teacher(sources, [*guided, *tokens], reported)
    series = [  # label, marks by number of chunks, style
        ("the teacher's chunks", _by_chunks(guided, metric), 0),
        ("random chunks", _by_chunks(chosen, metric), 1),
        (TOKEN_LEVEL, marks(settings_of(tokens), lambda run: 0.0, metric), 2),
    ]
    lines = [Line(name, points, style, name != TOKEN_LEVEL) for name, points, style in series]
    if reported:
        lines += _table_2(metric)
    lines = [line for line in lines if line.points]
    panels = []
    for which, what in enumerate(("IoU", "IoS")):
        moved = [_against_overlap(line, audit, which) for line in lines]
        names = {100 * overlaps[which]: str(n) for n, overlaps in audit.chunks.items()}
        label = f"{what} of student's and teacher's characters (%)"
        panels.append(Panel(label, metric_label(metric), _named_once(moved, names)))
    title = f"Quality by number of chunks against their overlap with {audit.teacher}'s"
    return Figure(6, f"{title} on {audit.dataset}", panels)


def _by_chunks(runs: Iterable[Trained], metric: str) -> list[Point]:
    return marks(settings_of(runs), lambda run: int(run.settings["chunks"]), metric)


def _audit_of_one_teacher(
    sources: Sources, guided: Iterable[Trained], reported: Sequence[str]
) -> Audited:
    names = {*by_teacher(guided), *({paper_guidance()[TABLE_2]["teacher"]} if reported else ())}
    audits = [audit for audit in sources.audited if audit.teacher in names]
    if len(names) != 1 or len(audits) > 1:
        raise ValueError(
            "expected runs and one audit of one teacher for --figure 6, found teachers "
            f"{', '.join(sorted(names))} and {len(audits)} audits of them: leave some out"
        )
    if not audits:
        _miss(6, f"an audit of {', '.join(names)}", f"{_AUDIT} --chunks 8 16 32 64")
    return audits[0]


def _table_2(metric: str) -> list[Line]:
    table = paper_guidance()[TABLE_2]
    if metric != table["column"]:
        raise ValueError(
            f"expected the metric of the paper's Table 2, {table['column']!r}, with --reported for "
            f"--figure 6, found {metric!r}: leave --metric out"
        )
    rows = (table["guided by the teacher"], table["random"])
    curves = [
        [Point(count, value) for count, value in zip(table["chunks"], row, strict=True)]
        for row in rows
    ]
    series = zip(
        ("the teacher's chunks", "random chunks", TOKEN_LEVEL),
        (*curves, [Point(0, table[TOKEN_LEVEL])]),
        strict=True,
    )
    return [
        Line(f"reported: {label}", points, style, label != TOKEN_LEVEL, reported=True)
        for style, (label, points) in enumerate(series)
    ]


def _against_overlap(line: Line, audit: Audited, which: int) -> Line:
    """A line over the number of chunks (0: the token level) as one over their IoU or IoS."""
    points = []
    for point in line.points:
        count = int(point.x or 0)
        if count and count not in audit.chunks:
            raise ValueError(
                f"expected the audit of {audit.teacher} to have {count} chunks, found "
                f"{', '.join(map(str, audit.chunks))}: audit again with --chunks {count}"
            )
        overlaps = audit.chunks[count] if count else audit.token_level
        points.append(replace(point, x=100 * overlaps[which]))
    return replace(line, points=points)


def _sweeps(sources: Sources, metric: str, reported: Sequence[str]) -> Figure:
    """Figure 7."""
    panels = []
    for method, option, scale, x_label in (
        ("vocagnolm", "top_k", 100, "share of the tokens trained, top_k (%)"),
        ("uld", "uld_weight", 1, "weight of the distance, lambda"),
    ):
        runs = [run for run in sources.trained if run.method == method]
        if len({run.settings[option] for run in runs}) > 1:
            lines = _sweep(runs, option, scale, metric)
            lines += level(sources.trained, metric, len(lines))
            panels.append(Panel(f"{METHODS[method]}: {x_label}", metric_label(metric), lines))
    if not panels:
        _miss(7, "runs that differ in top_k or uld_weight", "recipes/ablations/top_k-*.yaml")
    return Figure(7, "Sweeps of top_k and lambda", panels)


def _sweep(runs: Iterable[Trained], option: str, scale: float, metric: str) -> list[Line]:
    return [
        Line(
            teacher,
            marks(settings_of(of_one), lambda run: scale * float(run.settings[option]), metric),
            style,
        )
        for style, (teacher, of_one) in enumerate(by_teacher(runs).items())
    ]


PLANS: Mapping[int, Callable[[Sources, Any, Sequence[str]], Figure]] = {
    1: _vocabulary,
    3: _chunks,
    4: _methods,
    5: _teachers,
    6: _alignment,
    7: _sweeps,
}
"""The figures that are plots, by their number in the paper."""
