"""The results of an evaluation as data, and as a row of a table in Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from huggingface_hub import ModelCard

from vocagnolm.evaluation.accuracy import averages, summarize
from vocagnolm.evaluation.records import Record, RunDirectory
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, HARNESS_COMMIT
from vocagnolm.evaluation.tasks.tasks import Task
from vocagnolm.io import json_or_empty, markdown_table, versions, write_json, write_text

GRADER = f"ZubinGou/math-evaluation-harness@{HARNESS_COMMIT[:7]}"
RESULTS_FILE = "results.json"
_PACKAGES = "python vocagnolm torch transformers tokenizers accelerate vllm sympy math-verify"


def second_opinion() -> str:
    """Name the other grader, with its version."""
    return f"math-verify {metadata.version('math-verify')}"


def build_results(
    tasks: Sequence[Task],
    directory: RunDirectory,
    settings: Mapping[str, object],
    environment: Mapping[str, object],
) -> Record:
    """Collect everything known at the end; percentages are in [0, 100], intervals of 95 %."""
    # Benchmarks that were asked before, under the same settings, and whose items are all there.
    earlier = json_or_empty(directory.path / RESULTS_FILE).get("benchmarks", {})
    complete = {path.stem for path in directory.path.glob("*.jsonl")}
    columns = {name: column for name, column in earlier.items() if name in complete}
    columns |= {task.benchmark.id: _column(task, directory) for task in tasks}
    benchmarks = {name: columns[name] for name in BENCHMARKS if name in columns}
    averaged = averages(benchmarks)
    for name, average in averaged.items():
        average["marked"] = _distinct("marked", [benchmarks[each] for each in AVERAGES[name]])
    return {
        "model": settings["model"],
        "grader": GRADER,
        "second_opinion": second_opinion(),
        "benchmarks": benchmarks,
        "averages": averaged,
        "marks": _distinct("marks", benchmarks.values()),
        "settings": dict(settings),
        "environment": versions(_PACKAGES) | dict(environment),
    }


def _column(task: Task, directory: RunDirectory) -> Record:
    finished, marks = directory.finished(task.benchmark.id), task.marks()
    prompts, loaded = task.prompt_set, task.loaded
    return {
        "column": task.benchmark.column,
        "version": task.benchmark.version,
        "item_count": task.benchmark.item_count,
        **summarize([finished[item.idx] for item in task.items]),
        "prompts": prompts
        and {"name": prompts.name, "origin": prompts.origin, "sha256": prompts.sha256},
        "data": {"origin": loaded.origin, "digest": loaded.digest, "verified": loaded.verified},
        "marked": list(marks),
        "marks": list(marks.values()),
    }


def _distinct(name: str, columns: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(mark for column in columns for mark in column[name]))


def to_markdown(results: Record) -> str:
    """Lay out the accuracies, their intervals, the second opinion, and all that marks them."""
    notes = [f"- {note}" for note in _notes(results)]
    return "\n".join([markdown_table(_rows(results), padded=False), "", *notes]) + "\n"


def progress(task: Task, directory: RunDirectory) -> str:
    """Sum up a finished benchmark in a line for the log."""
    return f"{task.benchmark.id}: {in_a_line(_column(task, directory))}"


def in_a_line(summary: Record) -> str:
    """Write an accuracy with its interval."""
    low, high = summary["interval"]
    line = f"{summary['rounded']:.1f} (95 % interval {low:.1f} to {high:.1f})"
    return f"{line}, {summary['correct']} of {summary['n']} right"


def _rows(results: Record) -> list[list[str]]:
    # Columns and averages, by their headings.
    parts = {column["column"]: column for column in results["benchmarks"].values()}
    parts |= results["averages"]
    # The second grader is not asked about letters, and has no averages.
    opinions = [part.get("math_verify") for part in parts.values()]
    return [
        ["model", *parts],
        [results["model"]["name"], *map(_cell, parts.values())],
        ["95 % interval", *("{:.1f} to {:.1f}".format(*x["interval"]) for x in parts.values())],
        [results["second_opinion"], *(f"{x['rounded']:.1f}" if x else "-" for x in opinions)],
    ]


def _cell(part: Record) -> str:
    # A star: not to be put beside a published number.
    return f"{part['rounded']:.1f}{'*' if part['marked'] else ''}"


def _notes(results: Record) -> list[str]:
    notes = [f"graded by {results['grader']}"]
    for mark in results["marks"]:
        marked = [c["column"] for c in results["benchmarks"].values() if mark in c["marks"]]
        notes.append(f"* {mark} ({', '.join(marked)})")
    return notes


def write_results(results: Record, directory: RunDirectory) -> None:
    """Write `results.json` and `row.md`, and the table into the card of a model of ours."""
    table = to_markdown(results)
    write_json(directory.path / RESULTS_FILE, results)
    write_text(directory.path / "row.md", table)
    path = Path(results["model"]["name"]) / "README.md"
    if results["settings"].get("protocol") or not path.is_file():
        return
    card = ModelCard.load(path, ignore_metadata_errors=True)
    # In place of earlier results; cards of other people stay as they are.
    if "vocagnolm" in (card.data.tags or ()):
        heading = "## Evaluation\n"
        card.text = f"{card.text.partition(heading)[0].rstrip()}\n\n{heading}\n{table}"
        write_text(path, str(card))
