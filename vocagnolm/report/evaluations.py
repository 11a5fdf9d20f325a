"""Reads evaluations: accuracies, how they were asked and graded, and items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict

from vocagnolm.evaluation.records import SETTINGS_FILE, read_records
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import JsonObject, read_json

RESULTS_FILE = "results.json"
# The columns of Table 1 come first, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys(chain(PAPER_BENCHMARKS, AVERAGES, BENCHMARKS)))


class Score(TypedDict):
    """An accuracy of an evaluation, in percent."""

    # The label of the evaluation.
    run: str
    # The id of a benchmark, or the name of an average.
    column: str
    value: float
    # As the harness rounds it.
    rounded: float
    # The ends of the 95 % interval.
    low: float
    high: float
    # Words for why it cannot be compared with published numbers.
    marked: list[str]


class Item(NamedTuple):
    """What an evaluation has of one item."""

    right_outputs: int
    prompt_sha256: str
    gold: object


@dataclass(frozen=True)
class Evaluation:
    """The results of one evaluation."""

    label: str
    directory: Path
    # The name and revision of the model.
    model: str
    # The authors of the exemplars: "ours", "harness", "other" or "none", or several of them; or
    # "chat".
    prompts: str
    # In the order of Table 1.
    scores: Sequence[Score]
    # Outputs per item.
    samples: int
    # Only evaluations with the same one are compared: few-shot or chat, greedy or sampled.
    protocol: str
    # The number of items and of right outputs, by benchmark.
    counts: Mapping[str, tuple[int, int]]
    # By benchmark, everything that must be equal in two evaluations whose items are paired.
    settings: Mapping[str, JsonObject]
    # The grader, why numbers are not comparable with published ones, and the engine.
    notes: Sequence[str]

    def items(self, benchmark: str) -> dict[int, Item]:
        """Read the items of a benchmark by `idx`, and compare their counts with the results."""
        path = self.directory / f"{benchmark}.jsonl"
        items: dict[int, Item] = {}
        outputs = 0
        right = 0
        for (idx, _), record in read_records(path).items():
            is_right = record["correct"] is True
            right_before = items[idx].right_outputs if idx in items else 0
            items[idx] = Item(right_before + is_right, record["prompt_sha256"], record["gold"])
            outputs += 1
            right += is_right
        # The two files are written one after the other, so a killed evaluation may leave a new one
        # next to an old one.
        expected_items, expected_right = self.counts[benchmark]
        expected = expected_items, expected_items * self.samples, expected_right
        if (len(items), outputs, right) != expected:
            raise ValueError(
                f"{path}: {len(items)} items, {outputs} outputs and {right} right ones are not "
                f"those of {RESULTS_FILE}: evaluate again"
            )
        return items


def heading(column: str) -> str:
    """Return the heading of a column.

    >>> heading("tabmwp"), heading("AVG w/o SAT")
    ('TAB', 'AVG w/o SAT')
    """
    return BENCHMARKS[column].column if column in BENCHMARKS else column


def in_order(columns: Iterable[str]) -> list[str]:
    """Sort columns as in Table 1, each once. Other columns come last.

    >>> in_order(["mine", "demo", "AVG", "math", "gsm8k", "math"])
    ['gsm8k', 'math', 'AVG', 'demo', 'mine']
    """
    columns = set(columns)
    return [name for name in _COLUMNS if name in columns] + sorted(columns.difference(_COLUMNS))


def read_evaluation(label: str, directory: Path) -> Evaluation:
    """Read the results of an evaluation, and the settings under which its items were asked."""
    results = read_json(directory / RESULTS_FILE)
    settings = read_json(directory / SETTINGS_FILE)
    model, sampling = settings["model"], settings["sampling"]
    columns = results["benchmarks"] | results["averages"]
    scores: list[Score] = []
    for name in in_order(columns):
        low, high = columns[name]["interval"]
        scores.append(
            {
                "run": label,
                "column": name,
                "value": columns[name]["exact"],
                "rounded": columns[name]["rounded"],
                "low": low,
                "high": high,
                "marked": columns[name]["marked"],
            }
        )
    # Chat templates may differ between two models that are compared.
    shared = {"grader": settings["grader"], "sampling": sampling}
    shared["protocol"] = settings["protocol"] and settings["protocol"]["name"]
    authors: dict[str, None] = {}
    counts = {}
    # {why a number cannot be compared with a published one: headings}
    marks: dict[str, list[str]] = {}
    for name in in_order(results["benchmarks"]):
        column = results["benchmarks"][name]
        author = column["prompts"]["origin"] if column["prompts"] else "none"
        authors["ours" if author == "vocagnolm" else author] = None
        counts[name] = column["n"], column["correct"]
        for mark in column["marks"]:
            marks.setdefault(mark, []).append(heading(name))
    notes = [f"verdicts of {settings['grader']}"]
    for mark, headings in marks.items():
        notes.append(f"{mark} ({', '.join(headings)})")
    # Accuracies differ by tenths of a point between engines and dtypes.
    for name in ("engine", "dtype", "context"):
        notes.append(f"{name} {settings[name]}")
    # Nineteen characters: "sha256:" and twelve digits, or nineteen digits of a commit.
    return Evaluation(
        label=label,
        directory=directory,
        model=f"{public_name(model['name'])}, revision {model['revision'][:19]}",
        prompts="chat" if settings["protocol"] else ", ".join(authors),
        scores=scores,
        samples=sampling["samples"] if sampling else 1,
        protocol=json.dumps([shared["protocol"], sampling]),
        counts=counts,
        settings={name: shared | settings["benchmarks"][name] for name in counts},
        notes=notes,
    )
