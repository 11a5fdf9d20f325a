"""Draw figures 1, 3, 5, 6 and 7 of the paper from our runs.

    vocagnolm compare runs/paper/table1/* evaluations/* --reported "Table 1" --output_dir comparison
    python benchmarks/figures.py --comparison comparison/comparison.json \
        --audit audits/math/audit.json --figure 1 5 --output_dir figures

Two settings never share a mark. Runs that were asked or graded differently never share a figure.
Figures 3 and 6 need an audit with chunks (benchmarks/chunks.py), and figure 3 needs nothing else.
Figure 4 is the comparison's comparison.png.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES
from vocagnolm.report.paper import teacher_name
from vocagnolm.report.plots import add_legend, new_plot, series_style
from vocagnolm.report.trainings import METHODS
from vocagnolm.shell.io import read_json

STYLES = list(METHODS.values())
Runs = Sequence[dict[str, Any]]


class Numbers:
    """The numbers that the figures show."""

    def __init__(self, comparison: dict[str, Any], audits: list[dict[str, Any]]):
        self.trained: Runs = comparison["trained"]
        self.audited = [teacher for audit in audits for teacher in audit["teachers"]]
        self.settings: dict[str, Any] = {}
        self.models: dict[str, str] = {}
        # What is not as published about the numbers that were drawn.
        self.marked = set[str]()
        self.scores = {(row["run"], row["column"]): row for row in comparison["scores"]}
        for run in comparison["runs"]:
            self.settings[run["label"]] = run["settings"]
            # The label of each run that may be a teacher, by its model and by its own label.
            model = teacher_name(run["model"].rsplit(", revision ", 1)[0])
            if run["prompts"] != "chat":
                self.models |= {model: run["label"], run["label"]: run["label"]}
        self.reported: dict[str, dict[str, float]] = {}
        for row in comparison["reported"]:
            self.reported.setdefault(row["row"], {})[row["column"]] = row["reported"]

    def of(self, method: str) -> Runs:
        """Return the runs of a method."""
        return [run for run in self.trained if run["method"] == method]

    def score(self, run: str, metric: str) -> dict[str, Any]:
        """Return a run's score with its interval."""
        if (run, metric) not in self.scores:
            raise ValueError(f"{run} has no {metric}: evaluate it, or give another --metric")
        self.marked |= set(self.scores[run, metric]["marked"])
        return dict(self.scores[run, metric])

    def marks(
        self, runs: Runs, metric: str, places: Sequence[float]
    ) -> list[tuple[float, float, float, float]]:
        """Average runs by setting; return each one's x position, mean, and bar below and above."""
        self.check_alike([run["run"] for run in runs], metric)
        place_of = {run["setting"]: x for run, x in zip(runs, places, strict=True)}
        if len(set(place_of.values())) < len(place_of):
            raise ValueError(f"two of these would share a mark: {'; '.join(place_of)}")
        found = []
        for label, place in place_of.items():
            members = [run for run in runs if run["setting"] == label]
            if metric == "eval_loss":
                values = [float(run["eval_loss"]) for run in members]
                low = high = values[0]
            else:
                scores = [self.score(run["run"], metric) for run in members]
                values = [score["value"] for score in scores]
                low, high = scores[0]["low"], scores[0]["high"]
            mean = statistics.fmean(values)
            below, above = max(mean - low, 0), max(high - mean, 0)
            if len(values) > 1:
                below = above = statistics.stdev(values)
            found.append((place, mean, below, above))
        return sorted(found)

    def check_alike(self, runs: Sequence[str], metric: str) -> None:
        """Reject runs that were asked or graded differently."""
        names = AVERAGES.get(metric, [metric])
        found = [self.settings[run] for run in runs if run in self.settings]
        settings = [[of_run.get(name) for name in names] for of_run in found]
        if metric != "eval_loss" and any(other != settings[0] for other in settings):
            raise ValueError(f"asked or graded differently: {', '.join(runs)}")

    def quality(self, teacher: str, metric: str) -> float:
        """Return a teacher's quality: ours or, if there is none, the paper's."""
        if teacher in self.models:
            return float(self.score(self.models[teacher], metric)["value"])
        if metric in self.reported.get(teacher, {}):
            return self.reported[teacher][metric]
        raise ValueError(f"no {metric} of {teacher}: evaluate it, or compare --reported it")


def draw_marks(axes: Any, marks: Sequence[tuple[float, ...]], style: int, **look: Any) -> Any:
    """Draw the averages of settings with their bars."""
    x, y, *errors = map(list, zip(*marks, strict=True))
    return axes.errorbar(x, y, yerr=errors, capsize=2.5, **(series_style(style) | look))


def draw_reported(axes: Any, points: Sequence[tuple[float, float]], style: int) -> Any:
    """Draw the paper's numbers as hollow marks."""
    look = series_style(style) | {"markerfacecolor": "white", "linestyle": "none"}
    return axes.plot(*zip(*points, strict=True), **look)[0]


def draw_level(axes: Any, numbers: Numbers, metric: str, handles: dict[str, Any]) -> None:
    """Draw a line for continual pretraining, if there is such a run."""
    runs = numbers.of("CPT")
    for _, mean, _, _ in numbers.marks(runs, metric, [0.0] * len(runs)):
        handles["CPT"] = axes.axhline(mean, color="gray", linestyle=":")


def vocabulary(numbers: Numbers, metric: str) -> Any:
    """Draw figure 1: vocabulary overlap and quality of the teachers."""
    figure, places = new_plot(10, 4, columns=2)
    for axes, kind in zip(places, ("raw", "bytes"), strict=True):
        for index, teacher in enumerate(numbers.audited):
            name = teacher_name(teacher["teacher"])
            share = 100 * teacher["vocabulary_overlap"][kind]
            point = share, numbers.quality(name, metric)
            if name in numbers.models:
                axes.plot(*point, **series_style(index))
            else:
                draw_reported(axes, [point], index)
            axes.annotate(name, point, (4, 4), textcoords="offset points")
        axes.set(xlabel=f"teacher's tokens that the student has (%), {kind}", ylabel=metric)
    return figure


def chunks(numbers: Numbers, metric: str) -> Any:
    """Draw figure 3: IoU and IoS by number of chunks, with the token level on the right."""
    figure, places = new_plot(10.4, 4.2, columns=2)
    handles = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        ticks = [str(point["chunks"]) for point in numbers.audited[0]["chunks"]] + ["token level"]
        # The numbers of chunks are evenly spaced, and the token level follows after the last.
        axes.set_xticks(range(len(ticks)), ticks)
        for index, teacher in enumerate(numbers.audited):
            points = teacher["chunks"]
            # Bars are 95 % intervals over sequences: 1.96 standard errors, in percent.
            errors = [196 * point.get(f"{key}_standard_error", 0.0) for point in points]
            heights = [100 * point[key] for point in points]
            marks = list(zip(range(len(points)), heights, errors, errors, strict=True))
            handles[teacher_name(teacher["teacher"])] = draw_marks(axes, marks, index)
            level = 100 * teacher["mapping"][key]
            draw_marks(axes, [(len(ticks) - 1, level, 0.0, 0.0)], index)
        axes.set(xlabel="chunks of a sequence", ylabel=f"{name} (% of characters)")
    add_legend(figure, handles)
    return figure


def teachers(numbers: Numbers, metric: str) -> Any:
    """Draw figure 5: students and their teachers."""
    figure, (axes,) = new_plot(6.5, 4.8)
    guided = [run for run in numbers.trained if run["teacher"]]
    asked = [numbers.models.get(run[who], "") for run in guided for who in ("run", "teacher")]
    numbers.check_alike(asked, metric)
    qualities = {run["teacher"]: numbers.quality(run["teacher"], metric) for run in guided}
    points: dict[str, list[tuple[float, float]]] = {}
    for name, row in numbers.reported.items():
        # The name of a reported student is its teacher and its method.
        teacher, _, method = name.rpartition(" ")
        if teacher and method in STYLES and metric in row:
            qualities.setdefault(teacher, numbers.quality(teacher, metric))
            points.setdefault(method, []).append((qualities[teacher], row[metric]))
    handles: dict[str, Any] = {}
    for style, method in enumerate(STYLES):
        runs = [run for run in guided if run["method"] == method]
        if runs:
            marks = numbers.marks(runs, metric, [qualities[run["teacher"]] for run in runs])
            handles[method] = draw_marks(axes, marks, style)
        if method in points:
            handles[f"reported: {method}"] = draw_reported(axes, points[method], style)
    draw_level(axes, numbers, metric, handles)
    for name, quality in qualities.items():
        axes.annotate(name, (quality, 0), xycoords=("data", "axes fraction"), rotation=90)
    axes.set(xlabel=f"teacher: {metric}", ylabel=f"student: {metric}")
    add_legend(figure, handles)
    return figure


def alignment(numbers: Numbers, metric: str) -> Any:
    """Draw figure 6: quality by number of chunks, against the overlap of chunks."""
    tokens = numbers.of("VocAgnoLM")
    lines: dict[str, list[Any]] = {"teacher": [], "random": [], "token level": [*tokens]}
    for run in numbers.of("chunks"):
        lines["random" if run["options"]["chunk_guidance"] == "random" else "teacher"].append(run)
    numbers.check_alike([run["run"] for runs in lines.values() for run in runs], metric)
    guides = {run["teacher"] for run in (*lines["teacher"], *tokens)} or {"Mistral-ProXMath"}
    audited = [pair for pair in numbers.audited if teacher_name(pair["teacher"]) in guides]
    if len(guides) != 1 or len(audited) != 1:
        raise ValueError(f"figure 6 needs one audit of one teacher, found {len(audited)}: {guides}")
    figure, places = new_plot(10, 4, columns=2, sharey=True)
    handles: dict[str, Any] = {}
    for axes, key, name in zip(places, ("iou", "ios"), ("IoU", "IoS"), strict=True):
        # By number of chunks; 0 is the token level. Random chunks lie where the teacher's do.
        overlap = {point["chunks"]: 100 * point[key] for point in audited[0]["chunks"]}
        overlap[0] = 100 * audited[0]["mapping"][key]
        for style, (label, runs) in enumerate(lines.items()):
            look = {"linestyle": "none"} if label == "token level" else {}
            if runs:
                counts = [0 if run in tokens else run["options"]["chunks"] for run in runs]
                marks = numbers.marks(runs, metric, [overlap[count] for count in counts])
                handles[label] = draw_marks(axes, marks, style, **look)
            points = []
            for row, values in numbers.reported.items():
                # Names are "8 chunks, teacher", "8 chunks, random", and "token level, teacher".
                count, _, how = row.partition(" chunks, ")
                if how == label:
                    points.append((overlap[int(count)], values[metric]))
                elif row.startswith("token level") and label == "token level":
                    points.append((overlap[0], values[metric]))
            if points:
                handles[f"reported: {label}"] = draw_reported(axes, points, style)
        axes.set(xlabel=f"{name} of student's and teacher's characters (%)")
    places[0].set(ylabel=metric)
    add_legend(figure, handles)
    return figure


def sweeps(numbers: Numbers, metric: str) -> Any:
    """Draw figure 7: sweeps of top_k and lambda."""
    figure, both = new_plot(10, 4, columns=2)
    handles: dict[str, Any] = {}
    options = {"VocAgnoLM": "top_k", "ULD": "uld_weight"}
    for axes, (method, option) in zip(both, options.items(), strict=True):
        runs = numbers.of(method)
        for style, teacher in enumerate(sorted({run["teacher"] for run in runs})):
            of_one = [run for run in runs if run["teacher"] == teacher]
            marks = numbers.marks(of_one, metric, [run["options"][option] for run in of_one])
            handles[teacher] = draw_marks(axes, marks, style)
        draw_level(axes, numbers, metric, handles)
        axes.set(xlabel=f"{method}: {option}", ylabel=metric)
    add_legend(figure, handles)
    return figure


FIGURES = {1: vocabulary, 3: chunks, 5: teachers, 6: alignment, 7: sweeps}
# The columns that the paper draws. Table 4 has no average but AVG.
METRICS = {1: "AVG", 3: "", 5: "AVG", 6: "AVG w/o SAT", 7: "AVG w/o SAT"}


def main(argv: Sequence[str] | None = None) -> None:
    """Draw figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--comparison", type=Path, help="comparison.json; figure 3 needs none")
    parser.add_argument("--audit", type=Path, nargs="*", default=[], help="audit.json of audits")
    parser.add_argument("--figure", type=int, nargs="+", choices=FIGURES, required=True)
    parser.add_argument("--metric", help="gsm8k, AVG, ... or eval_loss; default: the paper's")
    parser.add_argument("--output_dir", type=Path, required=True)
    arguments = parser.parse_args(argv)
    comparison: dict[str, Any] = dict.fromkeys(("trained", "scores", "runs", "reported"), ())
    if arguments.comparison:
        comparison = read_json(arguments.comparison)
    numbers = Numbers(comparison, [*map(read_json, arguments.audit)])
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    for number in arguments.figure:
        figure = FIGURES[number](numbers, arguments.metric or METRICS[number])
        if numbers.marked:
            figure.suptitle(f"not as published: {', '.join(sorted(numbers.marked))}", fontsize=8)
        for kind in ("png", "pdf"):
            figure.savefig(arguments.output_dir / f"figure-{number}.{kind}")


if __name__ == "__main__":
    main()
