"""What a comparison reads: the results that evaluations left, and the rows the paper reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vocagnolm.evaluation.records import read_lines
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS

RESULTS_FILE = "results.json"
EVALUATION_DIR = "evaluation"  # where `evaluate_math.py` puts it inside a model's directory
REPORTED_FILE = Path(__file__).parents[1] / "assets" / "reported.json"
_COLUMNS = dict.fromkeys((*PAPER_BENCHMARKS, *AVERAGES, *BENCHMARKS))  # each once, in this order
_POSITIONS = {column: position for position, column in enumerate(_COLUMNS)}
_WHOSE = {"vocagnolm": "ours", "harness": "harness", "other": "other"}


@dataclass(frozen=True)
class Accuracy:
    """One number of a run, in percent.

    Attributes:
        rounded: as the harness rounds it.
        exact: without rounding.
        interval: of 95 %.
        marked: why it may not be put beside a published number, in a word each: "partial",
            "own_prompts", "other_prompts", "unverified_data".
    """

    rounded: float
    exact: float
    interval: tuple[float, float]
    marked: tuple[str, ...]


@dataclass(frozen=True)
class Graded:
    """One item of a run.

    Attributes:
        correct: the harness's verdict.
        asked: what was asked and expected: the prompt's hash and the gold.
    """

    correct: bool
    asked: tuple[Any, Any]


@dataclass(frozen=True)
class Run:
    """The results of one evaluation.

    Attributes:
        label: short and unlike that of any other run of the comparison.
        directory: holds `results.json` and one file of items per benchmark.
        model: name and revision.
        grader: whose verdicts the accuracies are.
        second_opinion: the other grader.
        prompts: whose exemplars: "ours", "harness", "other", "none", or several of them.
        accuracies: by column: benchmarks by id and averages by name, in Table 1's order.
        second_accuracies: the second opinion's, of those benchmarks that it judges.
        counts: items and right answers by benchmark.
        conditions: by benchmark, what must be the same in two runs whose items are paired.
        notes: why numbers may not be put beside published ones, each with its columns; and how
            they were made.
    """

    label: str
    directory: Path
    model: str
    grader: str
    second_opinion: str
    prompts: str
    accuracies: Mapping[str, Accuracy]
    second_accuracies: Mapping[str, Accuracy]
    counts: Mapping[str, tuple[int, int]]
    conditions: Mapping[str, Mapping[str, Any]]
    notes: Sequence[str]

    def items(self, benchmark: str) -> dict[int, Graded]:
        """The items of a benchmark by `idx`.

        Raises:
            ValueError: the file is missing, damaged, or says other than `results.json` does.
        """
        path = self.directory / f"{benchmark}.jsonl"
        if not path.is_file():
            raise ValueError(f"expected {path}, found none: run evaluate_math.py again")
        with path.open("rb") as file:
            try:
                items = {record["idx"]: _graded(record) for record in read_lines(path, file)}
            except KeyError as error:
                raise ValueError(
                    f"{path}: expected {error} in every item, found one without: "
                    "run evaluate_math.py again"
                ) from error
        found = len(items), sum(item.correct for item in items.values())
        if found != self.counts[benchmark]:
            raise ValueError(
                "{}: expected {} items, {} of them right, as in {}, found {} and {}: "
                "run evaluate_math.py again".format(
                    path, *self.counts[benchmark], RESULTS_FILE, *found
                )
            )
        return items


def _graded(record: Mapping[str, Any]) -> Graded:
    return Graded(record["correct"] is True, (record["prompt_sha256"], record["gold"]))


@dataclass(frozen=True)
class ReportedRow:
    """A row of one of the paper's tables.

    Attributes:
        name: the teacher and the method, or the model.
        table: where it stands.
        values: as printed, in percent, by column; columns without a number are left out.
    """

    name: str
    table: str
    values: Mapping[str, float]


def heading(column: str) -> str:
    """What stands above a column.

    >>> heading("tabmwp"), heading("AVG w/o SAT")
    ('TAB', 'AVG w/o SAT')
    """
    return BENCHMARKS[column].column if column in BENCHMARKS else column


def in_order(columns: Iterable[str]) -> list[str]:
    """Columns in Table 1's order, each once; what the table does not have comes last.

    >>> in_order(["demo", "AVG", "math", "gsm8k", "math"])
    ['gsm8k', 'math', 'AVG', 'demo']
    """
    return sorted(set(columns), key=_POSITIONS.__getitem__)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the results of evaluations.

    Args:
        paths: their directories, or those of models that hold them in `evaluation/`.

    Raises:
        ValueError: results are missing or damaged, or two paths lead to the same.
    """
    directories = [_directory(path) for path in paths]
    names = [
        directory.parent.name if directory.name == EVALUATION_DIR else directory.name
        for directory in directories
    ]
    runs: dict[Path, Run] = {}
    for path, directory, name in zip(paths, directories, names, strict=True):
        if directory in runs:
            raise ValueError(
                f"expected different runs, found {directory} twice, as {path} too: give it once"
            )
        runs[directory] = _read_run(directory, name if names.count(name) == 1 else str(path))
    return list(runs.values())


def _directory(path: Path) -> Path:
    for directory in (path / EVALUATION_DIR, path):
        if (directory / RESULTS_FILE).is_file():
            return directory.resolve()
    raise ValueError(
        f"expected {RESULTS_FILE} in {path} or in its {EVALUATION_DIR}/, found none: "
        "run evaluate_math.py first"
    )


def _read_run(directory: Path, label: str) -> Run:
    path = directory / RESULTS_FILE
    try:
        return _build_run(directory, label, json.loads(path.read_bytes()))
    except KeyError as error:
        found = f"none or an unknown {error}"
    except (AttributeError, TypeError, ValueError) as error:  # bad JSON is a ValueError
        found = str(error)
    raise ValueError(
        f"{path}: expected the results of evaluate_math.py, found {found}: evaluate again"
    )


def _build_run(directory: Path, label: str, results: Mapping[str, Any]) -> Run:
    benchmarks = {name: results["benchmarks"][name] for name in in_order(results["benchmarks"])}
    columns = {**benchmarks, **results["averages"]}
    opinions = {
        name: column["math_verify"] | {"marked": column["marked"]}
        for name, column in benchmarks.items()
        if column["math_verify"]
    }
    return Run(
        label=label,
        directory=directory,
        model=f"{results['model']['name']}, revision {results['model']['revision']}",
        grader=results["grader"],
        second_opinion=results["second_opinion"],
        prompts=", ".join(dict.fromkeys(_whose(column) for column in benchmarks.values())),
        accuracies={name: _accuracy(columns[name]) for name in in_order(columns)},
        second_accuracies={name: _accuracy(opinion) for name, opinion in opinions.items()},
        counts={name: (column["n"], column["correct"]) for name, column in benchmarks.items()},
        conditions={
            name: _conditions(results["grader"], column) for name, column in benchmarks.items()
        },
        notes=[*_notes(benchmarks), *_engine(results)],
    )


def _accuracy(column: Mapping[str, Any]) -> Accuracy:
    low, high = map(float, column["interval"])
    return Accuracy(
        float(column["rounded"]), float(column["exact"]), (low, high), tuple(column["marked"])
    )


def _whose(column: Mapping[str, Any]) -> str:
    return _WHOSE[column["prompts"]["origin"]] if column["prompts"] else "none"


def _conditions(grader: str, column: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "grader": grader,
        "version of the benchmark": column["version"],
        "prompts": column["prompts"] and column["prompts"]["sha256"],
        "data": column["data"]["digest"],
    }


def _notes(benchmarks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    marked: dict[str, list[str]] = {}
    for name, column in benchmarks.items():
        for mark in column["marks"]:
            marked.setdefault(mark, []).append(heading(name))
    return [f"{mark} ({', '.join(columns)})" for mark, columns in marked.items()]


def _engine(results: Mapping[str, Any]) -> list[str]:
    """What else moves a number by a few tenths."""
    settings = results.get("settings", {})
    names = [name for name in ("engine", "dtype", "context") if settings.get(name) is not None]
    return [", ".join(f"{name} {settings[name]}" for name in names)] if names else []


def read_reported(names: Sequence[str]) -> tuple[str, list[ReportedRow]]:
    """The paper these rows are from, and the rows.

    Raises:
        ValueError: there is no row of that name; the message lists those there are.
    """
    reported = json.loads(REPORTED_FILE.read_text(encoding="utf-8"))
    rows = {}
    for table in reported["tables"]:
        for name, values in table["rows"].items():
            pairs = zip(table["columns"], values, strict=True)
            present = {column: value for column, value in pairs if value is not None}
            rows[name] = ReportedRow(name, table["table"], present)
    for name in names:
        if name not in rows:
            raise ValueError(
                f"expected --reported to name a row of the paper, found {name!r}: "
                f"give one of {', '.join(map(repr, rows))}"
            )
    return reported["source"], [rows[name] for name in dict.fromkeys(names)]
