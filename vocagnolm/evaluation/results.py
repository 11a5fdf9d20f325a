"""From graded items to results: files, the row of Table 1, the model card, Weights & Biases."""

import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from huggingface_hub import ModelCard

from vocagnolm.evaluation.accuracy import averages, distinct, summarize
from vocagnolm.evaluation.records import EvaluationDirectory
from vocagnolm.evaluation.tasks.benchmarks import BENCHMARKS, HARNESS
from vocagnolm.evaluation.tasks.tasks import Task
from vocagnolm.shell.io import (
    JsonObject,
    json_or_empty,
    markdown_table,
    versions,
    write_json,
    write_text,
)
from vocagnolm.training.options import RunOptions
from vocagnolm.training.tracking import EVALUATION, begin_run, read_place

SECOND_OPINION = f"math-verify {metadata.version('math-verify')}"
_PACKAGES = "python vocagnolm torch transformers tokenizers accelerate vllm sympy math-verify"


def build(
    new_columns: Mapping[str, JsonObject],
    directory: EvaluationDirectory,
    environment: Mapping[str, object],
) -> JsonObject:
    """Collect the results of all benchmarks that were run, as columns."""
    settings = directory.settings()
    # Benchmarks of earlier runs with the same settings are kept if all their items are there.
    columns = json_or_empty(directory.path / "results.json").get("benchmarks", {})
    columns |= new_columns
    # The benchmarks of Table 1 come first, in its order, and a user's own last.
    benchmarks = {}
    for name in [*BENCHMARKS, *columns]:
        if name in columns and (directory.path / f"{name}.jsonl").exists():
            benchmarks[name] = columns[name]
    return {
        "model": settings["model"],
        "grader": HARNESS,
        "second_opinion": SECOND_OPINION,
        "benchmarks": benchmarks,
        "averages": averages(benchmarks),
        "marks": distinct("marks", benchmarks.values()),
        "settings": settings,
        "environment": versions(_PACKAGES) | dict(environment),
    }


def column(task: Task, directory: EvaluationDirectory) -> JsonObject:
    """Collect the results of one benchmark; percentages in [0, 100], 95 % intervals."""
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
    """Write a table of accuracies, intervals and second opinions, and explain its marks."""
    # Benchmarks and averages are columns of one table. Two files of benchmarks may have columns
    # with the same heading.
    parts = []
    for column in results["benchmarks"].values():
        parts.append((column["column"], column))
    parts += results["averages"].items()
    # With several outputs per item, the accuracy is avg@k, with pass@k below it. All benchmarks of
    # an evaluation are sampled in the same way.
    samples = max(part.get("samples", 1) for _, part in parts)
    name, opinion = results["model"]["name"], results["second_opinion"]
    cells = ["model", name, "95 % interval", opinion]
    if samples > 1:
        cells = ["model", f"{name}, avg@{samples}", "95 % interval", f"pass@{samples}", opinion]
    table = [cells]
    for heading, part in parts:
        # A star marks numbers that should not be compared with published ones.
        star = "*" if part["marked"] else ""
        low, high = part["interval"]
        cells = [heading, f"{part['rounded']:.1f}{star}", f"{low:.1f} to {high:.1f}"]
        if samples > 1:
            # Averages have none.
            passes = part.get("pass_at")
            cells.append(f"{passes[str(samples)]['rounded']:.1f}{star}" if passes else "-")
        # The second grader does not judge letters, and has no averages.
        opinion = part.get("math_verify")
        cells.append(f"{opinion['rounded']:.1f}" if opinion else "-")
        table.append(cells)
    # Each list of cells is a column.
    rows = list(zip(*table, strict=True))
    lines = [markdown_table(rows, padded=False), "", f"- graded by {results['grader']}"]
    # Explain each star once, with the benchmarks that have it for this reason.
    for mark in results["marks"]:
        marked = []
        for column in results["benchmarks"].values():
            if mark in column["marks"]:
                marked.append(column["column"])
        lines.append(f"- * {mark} ({', '.join(marked)})")
    return "\n".join(lines) + "\n"


def write(results: JsonObject, directory: Path) -> None:
    """Write `results.json` and `row.md`."""
    write_json(directory / "results.json", results)
    write_text(directory / "row.md", to_markdown(results))


def write_card(results: JsonObject) -> None:
    """Add the table to the card of a model trained here."""
    # A model of the hub has no card here to write. The table on the card is for the
    # paper's protocol, which a chat or sampled outputs do not follow.
    path = Path(results["model"]["name"]) / "README.md"
    settings = results["settings"]
    if settings.get("protocol") or settings.get("sampling") or not path.is_file():
        return
    card = ModelCard.load(path, ignore_metadata_errors=True)
    # Do not change other people's cards.
    if "vocagnolm" in (card.data.tags or ()):
        heading = "## Evaluation\n"
        before, _, section = card.text.partition(heading)
        # Replace the section of earlier results, but keep sections that were added after it.
        _, next_heading, after = section.partition("\n## ")
        card.text = f"{before.rstrip()}\n\n{heading}\n{to_markdown(results)}{next_heading}{after}"
        write_text(path, str(card))


def log_to_wandb(results: JsonObject, directory: Path) -> None:
    """Add the accuracies to the summary of a run, and the item files to its files.

    A checkpoint's evaluation goes to the run that wrote it, as `eval/checkpoint-500/gsm8k/...`.
    """
    name = results["model"]["name"]
    model = Path(name).resolve()
    # These parts tell the evaluations of one run apart: of its checkpoints, in a chat, and with
    # sampled outputs.
    parts = []
    # The directory of a run's model says which run wrote it. Checkpoints are in that directory.
    place = read_place(model)
    if not place and model.is_dir():
        place = read_place(model.parent)
        if place:
            parts.append(model.name)
    if results["settings"].get("protocol"):
        parts.append("chat")
    if results["settings"].get("sampling"):
        parts.append("sampled")
    part = "-".join(parts)
    # A model that no run wrote gets its own run.
    if not place:
        project = os.environ.get("WANDB_PROJECT", RunOptions.project)
        place = {"project": project, "name": f"evaluation of {name}"}
    # Add this entry to the run's configuration, whose other entries stay.
    entry = f"{EVALUATION}_{part}" if part else EVALUATION
    about_evaluation = {key: results[key] for key in ("model", "settings", "environment")}
    config = place.get("config", {}) | {entry: about_evaluation}
    samples = (results["settings"].get("sampling") or {}).get("samples", 1)
    metric = f"avg_at_{samples}_percent" if samples > 1 else "accuracy_percent"
    with begin_run(place | {"config": config}) as run:
        for column, values in (results["benchmarks"] | results["averages"]).items():
            # A slash in "w/o" would separate parts of the name.
            names = ["eval", part, column.replace("w/o", "without"), *values["marked"]]
            prefix = "/".join(filter(None, names))
            # Averages of benchmarks with several outputs per item have the same k.
            run.summary[f"{prefix}/{metric}"] = values["rounded"]
            for k, passes in values.get("pass_at", {}).items():
                run.summary[f"{prefix}/pass_at_{k}_percent"] = passes["rounded"]
            if "n" in values:
                run.summary[f"{prefix}/items"] = values["n"]
        # wandb saves files under their paths in the run's directory, so copy them there first.
        copies = Path(run.dir, EVALUATION, part)
        copies.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.json*"):
            shutil.copy(path, copies)
        run.save(f"{copies}/*", base_path=run.dir, policy="end")
