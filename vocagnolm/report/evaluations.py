"""Reads evaluations: accuracies, how they were asked and graded, and items."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from vocagnolm.evaluation.records import read_records
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.shell.io import JsonObject, json_or_empty, read_json

RESULTS_FILE = "results.json"
# Next to an evaluation's results: the settings of all benchmarks with items.
_SETTINGS_FILE = "settings.json"
# The columns of Table 1 come first, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys(chain(PAPER_BENCHMARKS, AVERAGES, BENCHMARKS)))
# These settings of a benchmark are read from its results.
_IN_RESULTS = {"version", "data_sha256", "prompts_sha256"}


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
    grader: str
    # The authors of the exemplars: "ours", "harness", "other" or "none", or several of them; or
    # "chat".
    prompts: str
    # In the order of Table 1.
    scores: Sequence[Score]
    # Outputs per item, and JSON of how they are sampled; "" means greedy decoding.
    samples: int
    sampling: str
    # The number of items and of right outputs, by benchmark.
    counts: Mapping[str, tuple[int, int]]
    # By benchmark, everything that must be equal in two evaluations whose items are paired.
    conditions: Mapping[str, Mapping[str, Any]]
    # Reasons against comparing numbers with published ones, each with its columns, and the engine.
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
    """Sort columns as in Table 1, each once. Those that are not in the table come last.

    >>> in_order(["mine", "demo", "AVG", "math", "gsm8k", "math"])
    ['gsm8k', 'math', 'AVG', 'demo', 'mine']
    """
    places = {name: place for place, name in enumerate(_COLUMNS)}
    return sorted(set(columns), key=lambda name: (places.get(name, len(places)), name))


def is_unfinished(directory: Path) -> bool:
    """Test for the directory of an evaluation that was begun, and has no results yet."""
    return (directory / _SETTINGS_FILE).exists() and not (directory / RESULTS_FILE).exists()


def read_evaluation(label: str, directory: Path) -> Evaluation:
    """Read the results of an evaluation."""
    results = read_json(directory / RESULTS_FILE)
    settings = results.get("settings", {})
    sampling = settings.get("sampling")
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
    authors = []
    counts = {}
    conditions = {}
    settings_of = _settings_by_benchmark(directory, settings)
    # {why a number cannot be compared with a published one: headings}
    marks: dict[str, list[str]] = {}
    for name in in_order(results["benchmarks"]):
        column = results["benchmarks"][name]
        prompts = column["prompts"] or {"origin": "none"}
        is_chat = "chat" in column["marked"]
        author = "chat" if is_chat else prompts["origin"]
        authors.append("ours" if author == "vocagnolm" else author)
        counts[name] = column["n"], column["correct"]
        conditions[name] = {
            "grader": results["grader"],
            "protocol": "chat" if is_chat else "the paper's",
            "sampling": sampling,
            "version of the benchmark": column["version"],
            "prompts": prompts.get("sha256"),
            "data": column["data"]["digest"],
            **settings_of.get(name, {}),
        }
        for mark in column["marks"]:
            marks.setdefault(mark, []).append(heading(name))
    notes = [f"{mark} ({', '.join(headings)})" for mark, headings in marks.items()]
    # Accuracies differ by tenths of a point between engines and dtypes.
    engine = []
    for name in ("engine", "dtype", "context"):
        if settings.get(name) is not None:
            engine.append(f"{name} {settings[name]}")
    if engine:
        notes.append(", ".join(engine))
    return Evaluation(
        label=label,
        directory=directory,
        model=f"{results['model']['name']}, revision {results['model']['revision']}",
        grader=results["grader"],
        prompts=", ".join(dict.fromkeys(authors)),
        scores=scores,
        samples=sampling["samples"] if sampling else 1,
        sampling=json.dumps(sampling) if sampling else "",
        counts=counts,
        conditions=conditions,
        notes=notes,
    )


def _settings_by_benchmark(directory: Path, settings: JsonObject) -> dict[str, JsonObject]:
    """Return how each benchmark was asked: the length, the end and the reading of answers."""
    # An evaluation adds a benchmark to those that were evaluated before, and its results have only
    # the new one's settings. Older results have none.
    recorded = json_or_empty(directory / _SETTINGS_FILE).get("benchmarks", {})
    recorded |= settings.get("benchmarks", {})
    settings_of = {}
    for benchmark, values in recorded.items():
        settings_of[benchmark] = {
            name: value for name, value in values.items() if name not in _IN_RESULTS
        }
    return settings_of


def conditions_that_differ(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Name the conditions in which two evaluations of one benchmark differ.

    What only the newer of them records counts as equal.
    """
    return [name for name in first if name in other and first[name] != other[name]]


def are_alike(first: Evaluation, other: Evaluation) -> bool:
    """Test whether two models were asked and graded on the same benchmarks in the same way."""
    if first.conditions.keys() != other.conditions.keys():
        return False
    for name, conditions in first.conditions.items():
        if conditions_that_differ(conditions, other.conditions[name]):
            return False
    return True
