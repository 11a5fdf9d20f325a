"""From graded items to the numbers of Table 1, as the harness rounds them, with intervals."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
from huggingface_hub import ModelCard

from vocagnolm.evaluation.extraction import NO_LETTER
from vocagnolm.evaluation.runner import RunDirectory
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, HARNESS
from vocagnolm.evaluation.tasks.tasks import Task
from vocagnolm.io import JsonObject, json_or_empty, markdown_table, versions, write_json, write_text

SECOND_OPINION = f"math-verify {metadata.version('math-verify')}"
_PACKAGES = "python vocagnolm torch transformers tokenizers accelerate vllm sympy math-verify"
Z_95 = 1.959963984540054


def accuracy(correct: int, n: int) -> JsonObject:
    """Give right answers among at least one in percent, with their interval.

    `rounded` is what the harness reports: one decimal, halves to the even digit.

    >>> accuracy(10, 32)["rounded"]
    31.2
    """
    exact = correct / n * 100
    # NumPy rounds halves to the even digit, and so do the harness's numbers.
    interval = list(wilson_interval(correct, n))
    rounded = float(np.round(exact, 1))
    return {"n": n, "correct": correct, "rounded": rounded, "exact": exact, "interval": interval}


def wilson_interval(correct: int, n: int) -> tuple[float, float]:
    """Give the 95 % score interval of a share, in percent (Wilson, 1927)."""
    share = correct / n
    centre = share + Z_95**2 / (2 * n)
    spread = Z_95 * math.sqrt(share * (1 - share) / n + Z_95**2 / (4 * n * n))
    scale = 100 / (1 + Z_95**2 / n)
    low, high = (centre - spread) * scale, (centre + spread) * scale
    # With none or all right one end is exactly 0 or 100, which floats miss by a little.
    return low if correct else 0.0, high if correct < n else 100.0


def average(columns: Sequence[JsonObject]) -> JsonObject:
    """Average the rounded columns, as published, and the exact ones, with an interval."""
    k = len(columns)
    exact = sum(column["exact"] for column in columns) / k
    # The columns' intervals are put together one side at a time (MOVER; Zou and Donner, 2008),
    # which stays right for columns near 0 and for few items.
    squares_below = []
    squares_above = []
    for column in columns:
        low, high = column["interval"]
        squares_below.append((column["exact"] - low) ** 2)
        squares_above.append((high - column["exact"]) ** 2)
    below = math.sqrt(sum(squares_below)) / k
    above = math.sqrt(sum(squares_above)) / k
    # The harness averages rounded columns, and prints one decimal.
    rounded = float(f"{sum(column['rounded'] for column in columns) / k:.1f}")
    return {"rounded": rounded, "exact": exact, "interval": [exact - below, exact + above]}


def averages(columns: Mapping[str, JsonObject]) -> dict[str, JsonObject]:
    """Compute those of the three averages whose benchmarks are all there, and what marks them."""
    complete = {}
    for name, members in AVERAGES.items():
        # An average that lacks a benchmark would be put next to published ones that have it.
        if columns.keys() >= set(members):
            parts = [columns[benchmark] for benchmark in members]
            complete[name] = average(parts) | {"marked": _distinct("marked", parts)}
    return complete


def summarize(records: Sequence[JsonObject]) -> JsonObject:
    """Sum up the items of one benchmark: verdicts, and completions that were generated here."""
    n = len(records)
    unanswered = 0
    correct = 0
    # These counts are of the second opinion, which letters do not get.
    judged = 0
    agreed = 0
    judged_correct = 0
    for record in records:
        unanswered += record["prediction"] in (None, "", NO_LETTER)
        correct += record["correct"]
        if record["math_verify"] is not None:
            judged += 1
            agreed += record["math_verify"] == record["correct"]
            judged_correct += record["math_verify"]
    opinion = None
    if judged:
        # Its accuracy is over all items: an opinion that is not there in time counts as wrong.
        opinion = accuracy(judged_correct, n)
        opinion |= {"agreement": agreed / judged, "without_opinion": n - judged}
    summary = accuracy(correct, n) | {
        "unanswered": unanswered / n,
        "decided_by": _count(record["decided_by"] for record in records),
        "math_verify": opinion,
    }
    # Stored outputs of another evaluator do not say how they ended.
    if all("finish_reason" in record for record in records):
        summary["finish_reasons"] = _count(record["finish_reason"] for record in records)
        summary["mean_new_tokens"] = sum(record["n_new_tokens"] for record in records) / n
    return summary


def _count(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def build_results(
    new_columns: Mapping[str, JsonObject],
    directory: RunDirectory,
    settings: Mapping[str, object],
    environment: Mapping[str, object],
) -> JsonObject:
    """Collect everything known at the end, as the columns of the benchmarks that were run."""
    # Benchmarks that were run before, under the same settings, are kept if their items are all
    # there. A part has a stem of two words, such as gsm8k.part0, so that it stands for no
    # benchmark.
    earlier = json_or_empty(directory.path / "results.json").get("benchmarks", {})
    complete = {path.stem for path in directory.path.glob("*.jsonl")}
    columns: dict[str, JsonObject] = {}
    for name, column in earlier.items():
        if name in complete:
            columns[name] = column
    columns |= new_columns
    # The benchmarks of Table 1 come first, in its order. A user's own follow, as the union keeps
    # the places of names that are there already.
    benchmarks = {}
    for name in BENCHMARKS:
        if name in columns:
            benchmarks[name] = columns[name]
    benchmarks |= columns
    return {
        "model": settings["model"],
        "grader": HARNESS,
        "second_opinion": SECOND_OPINION,
        "benchmarks": benchmarks,
        "averages": averages(benchmarks),
        "marks": _distinct("marks", benchmarks.values()),
        "settings": dict(settings),
        "environment": versions(_PACKAGES) | dict(environment),
    }


def column(task: Task, directory: RunDirectory) -> JsonObject:
    """Collect everything known of a benchmark; percentages are in [0, 100], intervals of 95 %."""
    finished, marks = directory.finished(task.benchmark.id), task.marks()
    records = [finished[item.idx] for item in task.items]
    return {
        "column": task.benchmark.column,
        "version": task.benchmark.version,
        "item_count": task.benchmark.item_count,
        **summarize(records),
        "prompts": task.prompt_set,
        "data": task.data,
        "marked": list(marks),
        "marks": list(marks.values()),
    }


def _distinct(name: str, columns: Iterable[JsonObject]) -> list[str]:
    """Return the marks of all columns, each once, in their order."""
    # A dictionary keeps the order, and each mark once.
    marks: dict[str, None] = {}
    for column in columns:
        marks |= dict.fromkeys(column[name])
    return list(marks)


def to_markdown(results: JsonObject) -> str:
    """Lay out the accuracies, their intervals, the second opinion, and all that marks them."""
    # Benchmarks and averages are columns of one table. Results of two files of benchmarks may have
    # the same heading.
    parts = []
    for column in results["benchmarks"].values():
        parts.append((column["column"], column))
    parts += results["averages"].items()
    header = ["model"]
    accuracies = [results["model"]["name"]]
    intervals = ["95 % interval"]
    opinions = [results["second_opinion"]]
    for heading, part in parts:
        header.append(heading)
        # A star marks what is not to be put next to a published number.
        star = "*" if part["marked"] else ""
        accuracies.append(f"{part['rounded']:.1f}{star}")
        low, high = part["interval"]
        intervals.append(f"{low:.1f} to {high:.1f}")
        # The second grader is not asked about letters, and has no averages.
        opinion = part.get("math_verify")
        opinions.append(f"{opinion['rounded']:.1f}" if opinion else "-")
    table = markdown_table([header, accuracies, intervals, opinions], padded=False)
    lines = [table, "", f"- graded by {results['grader']}"]
    # Each star is explained once, with the benchmarks that have it for this reason.
    for mark in results["marks"]:
        marked = []
        for column in results["benchmarks"].values():
            if mark in column["marks"]:
                marked.append(column["column"])
        lines.append(f"- * {mark} ({', '.join(marked)})")
    return "\n".join(lines) + "\n"


def one_line_summary(summary: JsonObject) -> str:
    """Write an accuracy with its interval."""
    low, high = summary["interval"]
    line = f"{summary['rounded']:.1f} (95 % interval {low:.1f} to {high:.1f})"
    line += f", {summary['correct']} of {summary['n']} right"
    # Outputs that were not graded count as wrong, and nobody has looked at them.
    ungraded = summary.get("decided_by", {}).get("crash", 0)
    if ungraded:
        line += f"; {ungraded} not graded, as the grader crashed"
    return line


def write_results(results: JsonObject, directory: RunDirectory) -> None:
    """Write `results.json` and `row.md`, and the table into the card of a model of ours."""
    table = to_markdown(results)
    write_json(directory.path / "results.json", results)
    write_text(directory.path / "row.md", table)
    # A name on the hub is not a directory here, and has no card to write. A chat is another
    # protocol than the one that the card's table is of.
    path = Path(results["model"]["name"]) / "README.md"
    if results["settings"].get("protocol") or not path.is_file():
        return
    card = ModelCard.load(path, ignore_metadata_errors=True)
    # Cards of other people stay as they are.
    if "vocagnolm" in (card.data.tags or ()):
        heading = "## Evaluation\n"
        before, _, section = card.text.partition(heading)
        # The section replaces that of earlier results. Sections that somebody has added after it
        # stay.
        _, next_heading, after = section.partition("\n## ")
        card.text = f"{before.rstrip()}\n\n{heading}\n{table}{next_heading}{after}"
        write_text(path, str(card))
