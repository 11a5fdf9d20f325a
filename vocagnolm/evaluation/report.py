"""From graded items to results, the row of Table 1 and the card of a model."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from huggingface_hub import ModelCard

from vocagnolm.evaluation.accuracy import averages, distinct, summarize
from vocagnolm.evaluation.runner import RunDirectory
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, HARNESS
from vocagnolm.evaluation.tasks.tasks import Task
from vocagnolm.io import JsonObject, json_or_empty, markdown_table, versions, write_json, write_text

SECOND_OPINION = f"math-verify {metadata.version('math-verify')}"
_PACKAGES = "python vocagnolm torch transformers tokenizers accelerate vllm sympy math-verify"


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
        "marks": distinct("marks", benchmarks.values()),
        "settings": dict(settings),
        "environment": versions(_PACKAGES) | dict(environment),
    }


def column(task: Task, directory: RunDirectory) -> JsonObject:
    """Collect everything known of a benchmark; percentages are in [0, 100], intervals of 95 %."""
    finished, marks = directory.finished(task.benchmark.id), task.marks()
    records = [finished[item.idx, sample] for item, sample in task.outputs()]
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
    # With several outputs per item the accuracy is avg@k, and pass@k stands below it. All
    # benchmarks of an evaluation are sampled alike.
    samples = max(part.get("samples", 1) for _, part in parts)
    passes = [f"pass@{samples}"]
    if samples > 1:
        accuracies[0] += f", avg@{samples}"
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
        # Averages have none.
        pass_at = part.get("pass_at")
        passes.append(f"{pass_at[str(samples)]['rounded']:.1f}{star}" if pass_at else "-")
    rows = [header, accuracies, intervals, opinions]
    if samples > 1:
        rows.insert(3, passes)
    table = markdown_table(rows, padded=False)
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
    samples = summary.get("samples", 1)
    if samples > 1:
        # Every output counts as much as another.
        line = f"avg@{samples} {line}, pass@{samples} "
        line += f"{summary['pass_at'][str(samples)]['rounded']:.1f}"
    outputs = summary["n"] * samples
    line += f", {summary['correct']} of {outputs} right"
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
    # A name on the hub is not a directory here, and has no card to write. A chat and drawn outputs
    # are another protocol than the one that the card's table is of.
    path = Path(results["model"]["name"]) / "README.md"
    settings = results["settings"]
    if settings.get("protocol") or settings.get("sampling") or not path.is_file():
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
