"""The results of an evaluation as data, and as a row of a table in Markdown and LaTeX."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from vocagnolm.evaluation.accuracy import Accuracy, averages, summarize
from vocagnolm.evaluation.records import Record, RunDirectory, read_lines, write_whole
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, HARNESS_COMMIT
from vocagnolm.evaluation.tasks.tasks import Task

GRADER = f"ZubinGou/math-evaluation-harness@{HARNESS_COMMIT[:7]}"
_LATEX = str.maketrans(
    {mark: rf"\{mark}" for mark in "&%$#_{}"}
    | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
)
_PACKAGES = (
    *("vocagnolm", "torch", "transformers", "tokenizers", "accelerate", "vllm"),
    *("sympy", "antlr4-python3-runtime", "word2number", "math-verify"),
)
RESULTS_FILE = "results.json"


def second_opinion() -> str:
    """The other grader, with its version."""
    return f"math-verify {importlib.metadata.version('math-verify')}"


def build_results(
    tasks: Sequence[Task],
    directory: RunDirectory,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Everything that is known at the end; percentages are in [0, 100], intervals of 95 %.

    Benchmarks that were asked before, under the same settings, keep their columns.
    """
    columns = _earlier(directory) | {t.benchmark.id: _column(t, directory) for t in tasks}
    benchmarks = {name: columns[name] for name in BENCHMARKS if name in columns}
    accuracies = {
        name: Accuracy.of(column["correct"], column["n"]) for name, column in benchmarks.items()
    }
    marks = {mark: None for column in benchmarks.values() for mark in column["marks"]}  # each once
    return {
        "model": settings["model"],
        "grader": GRADER,
        "second_opinion": second_opinion(),
        "benchmarks": benchmarks,
        "averages": {
            name: value | _marks_of_average([benchmarks[member] for member in AVERAGES[name]])
            for name, value in averages(accuracies).items()
        },
        "marks": list(marks),
        "settings": dict(settings),
        "environment": versions() | dict(environment),
    }


def _earlier(directory: RunDirectory) -> dict[str, Any]:
    """The columns of other benchmarks that were asked here before, under the same settings."""
    path = directory.path / RESULTS_FILE
    if not path.exists():
        return {}
    (results,) = read_lines(path, [path.read_bytes()])
    columns: dict[str, Any] = results.get("benchmarks", {})
    is_same = results.get("grader") == GRADER
    return {name: c for name, c in columns.items() if is_same and directory.is_complete(name)}


def _column(task: Task, directory: RunDirectory) -> dict[str, Any]:
    finished = directory.finished(task.benchmark.id)
    records: list[Record] = [finished[item.idx] for item in task.items]
    prompts = task.prompt_set
    return {
        "column": task.benchmark.column,
        "version": task.benchmark.version,
        "item_count": task.benchmark.item_count,
        "partial": task.is_partial,
        **summarize(records),
        "prompts": prompts
        and {"name": prompts.name, "origin": prompts.origin, "sha256": prompts.sha256},
        "data": {
            "origin": task.loaded.origin,
            "digest": task.loaded.digest,
            "verified": task.loaded.verified,
        },
        "marked": list(task.marks()),
        "marks": list(task.marks().values()),
    }


def _marks_of_average(columns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An average is marked as its columns are."""
    return {
        "partial": any(column["partial"] for column in columns),
        "marked": list(dict.fromkeys(name for column in columns for name in column["marked"])),
    }


def versions() -> dict[str, Any]:
    """Versions that may change a number."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """A table with the accuracies, their intervals and the second opinion, and what marks them."""
    rows = [
        ["model", *_headings(results)],
        [results["model"]["name"], *(_cell(part) for part in _parts(results))],
        ["95 % interval", *("{:.1f} to {:.1f}".format(*p["interval"]) for p in _parts(results))],
        [f"{results['second_opinion']} (stricter)", *_opinions(results)],
    ]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    notes = [f"- {note}" for note in _notes(results)]
    return "\n".join([*lines, "", *notes]) + "\n"


def progress(task: Task, directory: RunDirectory) -> str:
    """A line for the log when a benchmark is done."""
    column = _column(task, directory)
    low, high = column["interval"]
    marks = "".join(f"; {mark}" for mark in column["marks"])
    return (
        f"{task.benchmark.id}: {_cell(column)} (95 % interval {low:.1f} to {high:.1f}), "
        f"{column['correct']} of {column['n']} right{marks}"
    )


def latex(results: Mapping[str, Any]) -> str:
    """The accuracies as a row of a LaTeX table; comments say what they are."""
    cells = [results["model"]["name"].translate(_LATEX), *map(_cell, _parts(results))]
    comments = [f"% {' & '.join(['model', *_headings(results)])}"]
    comments += [f"% {note}" for note in _notes(results)]
    return "\n".join([*comments, " & ".join(cells) + r" \\"]) + "\n"


def _headings(results: Mapping[str, Any]) -> list[str]:
    columns = [column["column"] for column in results["benchmarks"].values()]
    return [*columns, *results["averages"]]


def _parts(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*results["benchmarks"].values(), *results["averages"].values()]


def _cell(part: Mapping[str, Any]) -> str:
    """The number, with a star if it may not be put beside a published one."""
    return f"{part['rounded']:.1f}" + ("*" if part["marked"] else "")


def _opinions(results: Mapping[str, Any]) -> list[str]:
    """The second grader's numbers; it is not asked about letters, and has no averages."""
    opinions = [column["math_verify"] for column in results["benchmarks"].values()]
    stars = ["*" if column["marked"] else "" for column in results["benchmarks"].values()]
    cells = [
        f"{opinion['rounded']:.1f}{star}" if opinion else "-"
        for opinion, star in zip(opinions, stars, strict=True)
    ]
    return cells + ["-"] * len(results["averages"])


def _notes(results: Mapping[str, Any]) -> list[str]:
    notes = [f"graded by {results['grader']}"]
    for mark in results["marks"]:
        marked = [c["column"] for c in results["benchmarks"].values() if mark in c["marks"]]
        notes.append(f"* {mark} ({', '.join(marked)})")
    return notes


def write_results(results: Mapping[str, Any], directory: RunDirectory) -> None:
    """Write `results.json`, `row.md` and `row.tex`."""
    write_whole(directory.path / RESULTS_FILE, json.dumps(results, indent=2) + "\n")
    write_whole(directory.path / "row.md", markdown(results))
    write_whole(directory.path / "row.tex", latex(results))
