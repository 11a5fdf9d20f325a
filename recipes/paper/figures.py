"""Draw figures 1 and 3 to 7 of the paper from runs of ours.

    vocagnolm compare runs/paper/table1/* evaluations/* --reported "Table 1" --output_dir comparison
    python recipes/paper/figures.py --comparison comparison/comparison.json \
        --audit audits/math/audit.json --figure 1 5 --output_dir figures

Runs that differ in nothing but their seed are one mark: the mean, with its standard deviation. The
bar of a single run is the 95 % interval of its evaluation. The paper's numbers are hollow. Two
settings never share a mark, and runs that were asked or graded differently no figure.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.audit import draw_audit
from vocagnolm.report.page import draw_bars
from vocagnolm.report.paper import teacher_name
from vocagnolm.report.plots import add_legend, dashes, new_plot, save_plot, series_style

METHODS = ["VocAgnoLM", "ULD", "KLD", "CPT", "Rho-1", "chunks", "random tokens"]
# The columns that the paper draws; Table 4 has no other average than AVG.
METRICS = {1: "AVG", 4: "AVG", 5: "AVG", 6: "AVG w/o SAT", 7: "AVG w/o SAT"}
TABLE_2_TEACHER = "Mistral-ProXMath"


class Numbers:
    """All numbers that are drawn."""

    def __init__(self, comparison: dict[str, Any], audits: list[dict[str, Any]]) -> None:
        columns = ["run", "method", "teacher", "setting", "options", "eval_loss"]
        self.trained = pd.DataFrame(comparison.get("trained", []), columns=columns)
        self.audits = audits
        self.scores = {
            (row["run"], row["column"]): row
            for row in comparison.get("scores", [])
            if not row["second"]
        }
        # Rows of the paper, each with its numbers by column.
        self.reported: dict[str, dict[str, float]] = {}
        for row in comparison.get("reported", []):
            self.reported.setdefault(row["row"], {})[row["column"]] = row["reported"]
        # Who may be a teacher: an evaluation by its model, or a run of ours by its name.
        self.models, self.conditions = {}, {}
        for run in comparison.get("runs", []):
            self.conditions[run["label"]] = run["conditions"]
            self.models[teacher_name(run["model"].rsplit(", revision ", 1)[0])] = run["label"]
        self.models |= {name: name for name in self.trained.run if name in self.conditions}

    def value(self, run: str, metric: str) -> dict[str, Any]:
        """Return the value of a run, and the ends of its interval."""
        if metric == "eval_loss":
            loss = self.trained.set_index("run").eval_loss[run]
            if pd.isna(loss):
                raise ValueError(f"{run} has no held-out loss: train it with --eval_fraction")
            return {"value": loss, "low": loss, "high": loss, "marked": []}
        if (run, metric) not in self.scores:
            raise ValueError(f"{run} has no {metric}: evaluate it, or give another --metric")
        return self.scores[run, metric]

    def marks(self, runs: pd.DataFrame, metric: str) -> pd.DataFrame:
        """Average runs by setting: columns x, y, low, high, marked and settings."""
        self.check_alike(list(runs.run), metric)
        rows = []
        for _, setting in runs.groupby("setting", sort=False):
            scores = pd.DataFrame([self.value(run, metric) for run in setting.run])
            mean, deviation = scores.value.mean(), scores.value.std()
            low, high = mean - deviation, mean + deviation
            if len(scores) == 1:
                low, high = scores.low[0], scores.high[0]
            marked = scores.marked.map(bool).any()
            rows.append((setting.x.iloc[0], mean, low, high, marked, setting.setting.iloc[0]))
        found = pd.DataFrame(rows, columns=["x", "y", "low", "high", "marked", "setting"])
        if found.x.duplicated().any():
            both = found[found.x.duplicated(keep=False)].setting
            raise ValueError(f"two settings would share a mark: {' and '.join(both[:2])}")
        return found.sort_values("x")

    def check_alike(self, runs: list[str], metric: str) -> None:
        """Reject runs that were asked or graded differently."""
        names = AVERAGES.get(metric, [metric])
        conditions = [
            {name: self.conditions[run].get(name) for name in names}
            for run in runs
            if metric != "eval_loss" and run in self.conditions
        ]
        if any(found != conditions[0] for found in conditions):
            raise ValueError(f"asked or graded differently: {', '.join(runs)}")

    def quality(self, teacher: str, metric: str) -> float:
        """Return the quality of a teacher: ours, or else the paper's."""
        if teacher in self.models:
            return float(self.value(self.models[teacher], metric)["value"])
        if metric in self.reported.get(teacher, {}):
            return self.reported[teacher][metric]
        raise ValueError(f"no {metric} of {teacher}: evaluate it, or compare --reported {teacher}")


def label_of(metric: str) -> str:
    """Return the label of an axis of quality."""
    return "held-out loss (nats)" if metric == "eval_loss" else f"accuracy, {metric} (%)"


def draw_line(axes: Any, marks: pd.DataFrame, style: int, *, joined: bool = True) -> Any:
    """Draw averaged settings with their bars."""
    errors = [(marks.y - marks.low).clip(lower=0), (marks.high - marks.y).clip(lower=0)]
    line = dashes(style) if joined else "none"
    return axes.errorbar(
        marks.x, marks.y, yerr=errors, linestyle=line, capsize=2.5, **series_style(style)
    )


def draw_reported(axes: Any, points: list[tuple[float, float]], style: int) -> Any:
    """Draw numbers of the paper, hollow."""
    look = {"markerfacecolor": "white", "linestyle": "none", **series_style(style)}
    return axes.plot(*zip(*sorted(points), strict=True), **look)[0]


def draw_level(axes: Any, numbers: Numbers, metric: str, handles: dict[str, Any]) -> None:
    """Draw the level of continual pretraining, if there is such a run."""
    runs = numbers.trained[numbers.trained.method == "CPT"]
    if len(runs):
        (y,) = numbers.marks(runs.assign(x=0.0), metric).y
        handles["CPT"] = axes.axhline(y, color="gray", linestyle=":")


def vocabulary(numbers: Numbers, metric: str) -> Any:
    """Figure 1: vocabulary overlap and quality of the teachers."""
    figure, places = new_plot(10, 4, columns=2)
    for axes, kind in zip(places, ("raw", "bytes"), strict=True):
        for audit in numbers.audits:
            for index, teacher in enumerate(audit["teachers"]):
                name = teacher_name(teacher["teacher"])
                share = 100 * teacher["vocabulary_overlap"][kind]["teacher"]
                quality = numbers.quality(name, metric)
                fill = None if name in numbers.models else "white"
                axes.plot(share, quality, markerfacecolor=fill, **series_style(index))
                axes.annotate(name, (share, quality), (4, 4), textcoords="offset points")
        axes.set(xlabel=f"teacher's tokens that are the student's too (%), {kind}")
        axes.set(ylabel=label_of(metric))
    return figure


def methods(numbers: Numbers, metric: str) -> Any:
    """Figure 4: methods compared, on all columns."""
    numbers.check_alike(list(numbers.conditions), metric)
    series: dict[str, dict[str, Any]] = {}
    columns = list(dict.fromkeys(column for _, column in numbers.scores))
    for setting, runs in numbers.trained.groupby("setting", sort=False):
        series[str(setting)] = {}
        for column in columns:
            if all((run, column) in numbers.scores for run in runs.run):
                (mark,) = numbers.marks(runs.assign(x=0.0), column).itertuples()
                bar = {"value": mark.y, "low": mark.low, "high": mark.high, "marked": mark.marked}
                series[str(setting)][column] = bar
    for name, row in numbers.reported.items():
        bars = {column: {"value": value, "marked": False} for column, value in row.items()}
        series[f"reported: {name}"] = bars
    return draw_bars(series, "Methods compared")


def teachers(numbers: Numbers, metric: str) -> Any:
    """Figure 5: students and their teachers."""
    figure, (axes,) = new_plot(6.5, 4.5)
    guided = numbers.trained[numbers.trained.teacher != ""]
    qualities = {name: numbers.quality(name, metric) for name in guided.teacher.unique()}
    handles: dict[str, Any] = {}
    for method, runs in guided.groupby("method", sort=False):
        marks = numbers.marks(runs.assign(x=runs.teacher.map(qualities)), metric)
        handles[str(method)] = draw_line(axes, marks, METHODS.index(str(method)))
    points: dict[str, list[tuple[float, float]]] = {}
    for name, row in numbers.reported.items():
        # A reported student is named by its teacher and its method.
        teacher, _, method = name.rpartition(" ")
        if method in METHODS and metric in row and teacher in (*numbers.reported, *qualities):
            quality = numbers.quality(teacher, metric)
            points.setdefault(method, []).append((quality, row[metric]))
            qualities.setdefault(teacher, quality)
    for method, found in points.items():
        handles[f"reported: {method}"] = draw_reported(axes, found, METHODS.index(method))
    draw_level(axes, numbers, metric, handles)
    for name, quality in qualities.items():
        axes.annotate(name, (quality, axes.get_ylim()[0]), rotation=90, fontsize=7)
    axes.set(xlabel=f"teacher: {label_of(metric)}", ylabel=f"student: {label_of(metric)}")
    add_legend(figure, handles)
    return figure


def alignment(numbers: Numbers, metric: str) -> Any:
    """Figure 6: quality by number of chunks against their overlap."""
    runs = numbers.trained
    chunked = runs[runs.method == "chunks"]
    is_random = chunked.options.map(lambda options: options["chunk_guidance"] == "random")
    tokens = runs[runs.method == "VocAgnoLM"]
    lines = {
        "the teacher's chunks": chunked[~is_random],
        "random chunks": chunked[is_random],
        "token level": tokens,
    }
    guides = {*chunked[~is_random].teacher, *tokens.teacher} or {TABLE_2_TEACHER}
    audited = [
        teacher
        for audit in numbers.audits
        for teacher in audit["teachers"]
        if teacher_name(teacher["teacher"]) in guides
    ]
    if len(guides) != 1 or len(audited) != 1:
        raise ValueError(f"figure 6 needs one audit of one teacher, found {guides}")
    numbers.check_alike([*chunked.run, *tokens.run], metric)
    figure, places = new_plot(10, 4, columns=2, sharey=True)
    handles: dict[str, Any] = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        # By number of chunks, 0 for the token level; random chunks lie as the teacher's do.
        overlap = {point["chunks"]: 100 * point[key] for point in audited[0]["chunks"]}
        overlap[0] = 100 * audited[0]["token_level"][key]
        for style, (label, of_line) in enumerate(lines.items()):
            counts = of_line.options.map(
                lambda options: options["chunks"] if options["method"] == "chunk" else 0
            )
            if missing := set(counts) - set(overlap):
                raise ValueError(f"audit again with --chunks {missing}")
            if len(of_line):
                marks = numbers.marks(of_line.assign(x=counts.map(overlap)), metric)
                handles[label] = draw_line(axes, marks, style, joined=label != "token level")
            points = []
            for row, values in numbers.reported.items():
                # As "8 chunks, teacher", "8 chunks, random"; the last row is the token level.
                if row.startswith("token level") or " chunks, " in row:
                    how = 2 if row.startswith("token") else 1 if row.endswith("random") else 0
                    count = 0 if how == 2 else int(row.split()[0])
                    if how == style and metric in values and count in overlap:
                        points.append((overlap[count], values[metric]))
            if points:
                handles[f"reported: {label}"] = draw_reported(axes, points, style)
        axes.set(xlabel=f"{name} of student's and teacher's characters (%)")
    places[0].set(ylabel=label_of(metric))
    add_legend(figure, handles)
    return figure


def sweeps(numbers: Numbers, metric: str) -> Any:
    """Figure 7: sweeps of top_k and lambda."""
    figure, places = new_plot(10, 4, columns=2)
    handles: dict[str, Any] = {}
    options = (("VocAgnoLM", "top_k", 100), ("ULD", "uld_weight", 1))
    for axes, (method, option, scale) in zip(places, options, strict=True):
        runs = numbers.trained[numbers.trained.method == method]
        runs = runs.assign(x=[scale * float(values[option]) for values in runs.options])
        for style, (teacher, of_one) in enumerate(runs.groupby("teacher")):
            handles[str(teacher)] = draw_line(axes, numbers.marks(of_one, metric), style)
        draw_level(axes, numbers, metric, handles)
        unit = " (%)" if scale == 100 else ""
        axes.set(xlabel=f"{method}: {option}{unit}", ylabel=label_of(metric))
    add_legend(figure, handles)
    return figure


FIGURES = {1: vocabulary, 4: methods, 5: teachers, 6: alignment, 7: sweeps}


def main(argv: list[str] | None = None) -> None:
    """Draw figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparison", type=Path, help="comparison.json of vocagnolm compare")
    parser.add_argument("--audit", type=Path, nargs="*", default=[], help="audit.json of audits")
    parser.add_argument("--figure", type=int, nargs="+", choices=(1, 3, 4, 5, 6, 7), required=True)
    parser.add_argument("--metric", help="gsm8k, AVG, ... or eval_loss; default: the paper's")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    comparison = json.loads(arguments.comparison.read_text()) if arguments.comparison else {}
    audits = [json.loads(path.read_text()) for path in arguments.audit]
    numbers = Numbers(comparison, audits)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for number in arguments.figure:
        path = arguments.output_dir / f"figure-{number}.png"
        if number == 3:
            for index, audit in enumerate(audits):
                draw_audit(audit, path if index == 0 else path.with_stem(f"figure-3-{index + 1}"))
            continue
        figure = FIGURES[number](numbers, arguments.metric or METRICS[number])
        save_plot(figure, path, ".pdf")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"figures.py: {error}")
