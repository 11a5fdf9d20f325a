"""Read the directories of evaluations, training runs and audits, and the rows of the paper."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vocagnolm.evaluation.records import read_lines
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.host.files import read_json

Json = Mapping[str, Any]

RESULTS_FILE, SETTINGS_FILE, STATE_FILE = "results.json", "run.json", "trainer_state.json"
AUDIT_FILE, GUIDANCE_FILE, GUIDANCE_DIR = "audit.json", "guidance.json", "guidance"
EVALUATION_DIR = "evaluation"  # where `evaluate_math.py` puts it inside a model's directory
EVAL_LOSS = "eval_loss"  # the column of runs without an evaluation
_ASSETS = Path(__file__).parents[1] / "assets"
REPORTED_FILE, PAPER_FILE = _ASSETS / "reported.json", _ASSETS / "paper_guidance.json"
_COLUMNS = dict.fromkeys((*PAPER_BENCHMARKS, *AVERAGES, *BENCHMARKS))  # each once, in this order
_POSITIONS = {column: position for position, column in enumerate(_COLUMNS)}
_WHOSE = {"vocagnolm": "ours", "harness": "harness", "other": "other"}


@dataclass(frozen=True)
class AccuracyScore:
    """One number of an evaluation, in percent, with its 95 % interval.

    Attributes:
        column: a benchmark by id, or an average by name.
        second: by the second grader.
        value: exact.
        rounded: as the harness rounds it.
        marked: reasons, a word each, not to put it beside a published number: "partial",
            "own_prompts", "other_prompts", "unverified_data".
    """

    column: str
    second: bool
    value: float
    rounded: float
    low: float
    high: float
    marked: tuple[str, ...]


@dataclass(frozen=True)
class Graded:
    """One item of a run: the harness's verdict, and the prompt's hash with the gold."""

    correct: bool
    asked: tuple[object, object]


@dataclass(frozen=True)
class Run:
    """The results of one evaluation.

    Attributes:
        label: unlike that of any other run of the comparison.
        directory: holds `results.json` and one file of items per benchmark.
        model: name and revision.
        prompts: authors of the exemplars: "ours", "harness", "other", "none", or several of them.
        scores: in Table 1's order, the second opinion's last.
        counts: items and right answers by benchmark.
        conditions: by benchmark, all that must be equal in two runs whose items are paired.
        notes: reasons not to put numbers beside published ones, each with its columns; engine.
    """

    label: str
    directory: Path
    model: str
    grader: str
    second_opinion: str
    prompts: str
    scores: Sequence[AccuracyScore]
    counts: Mapping[str, tuple[int, int]]
    conditions: Mapping[str, Json]
    notes: Sequence[str]

    def items(self, benchmark: str) -> dict[int, Graded]:
        """Read the items of a benchmark by `idx`.

        Raises:
            ValueError: the file is missing, damaged, or contradicts `results.json`.
        """
        path = self.directory / f"{benchmark}.jsonl"
        if not path.is_file():
            reject(path, "none", "run evaluate_math.py again")
        with path.open("rb") as file:
            try:
                items = {
                    record["idx"]: Graded(
                        record["correct"] is True, (record["prompt_sha256"], record["gold"])
                    )
                    for record in read_lines(path, file)
                }
            except KeyError as error:
                raise ValueError(
                    f"{path}: expected {error} in every item, found one without: "
                    "run evaluate_math.py again"
                ) from error
        found = len(items), sum(item.correct for item in items.values())
        if found != self.counts[benchmark]:
            n, right = self.counts[benchmark]
            raise ValueError(
                f"{path}: expected {n} items, {right} of them right, as in {RESULTS_FILE}, found "
                f"{found[0]} and {found[1]}: run evaluate_math.py again"
            )
        return items


def reject(expected: object, found: object, advice: str) -> NoReturn:
    """Raise the ValueError of a wrong directory or option, in one line."""
    raise ValueError(f"expected {expected}, found {found}: {advice}")


def heading(column: str) -> str:
    """Return the heading of a column.

    >>> heading("tabmwp"), heading("AVG w/o SAT")
    ('TAB', 'AVG w/o SAT')
    """
    return BENCHMARKS[column].column if column in BENCHMARKS else column


def in_order(columns: Iterable[str]) -> list[str]:
    """Sort columns as in Table 1, each once; those that the table does not have come last.

    >>> in_order(["demo", "AVG", "math", "gsm8k", "math"])
    ['gsm8k', 'math', 'AVG', 'demo']
    """
    return sorted(set(columns), key=_POSITIONS.__getitem__)


# -- Evaluations -----------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the results of evaluations: their directories, or models' that hold `evaluation/`.

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
            reject("different runs", f"{directory} twice, as {path} too", "give it once")
        runs[directory] = _read_run(directory, name if names.count(name) == 1 else str(path))
    return list(runs.values())


def is_evaluated(path: Path) -> bool:
    """Tell whether there is an evaluation in a directory, or in its `evaluation/`."""
    return any((x / RESULTS_FILE).is_file() for x in (path, path / EVALUATION_DIR))


def _directory(path: Path) -> Path:
    for directory in (path / EVALUATION_DIR, path):
        if (directory / RESULTS_FILE).is_file():
            return directory.resolve()
    reject(
        f"{RESULTS_FILE} in {path} or in its {EVALUATION_DIR}/",
        "none",
        "run evaluate_math.py first",
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


def _build_run(directory: Path, label: str, results: Json) -> Run:
    benchmarks = {name: results["benchmarks"][name] for name in in_order(results["benchmarks"])}
    # The first grader judges benchmarks and averages, the second one some benchmarks.
    columns = {**benchmarks, **results["averages"]}
    scores = [_score(name, columns[name]) for name in in_order(columns)]
    for name, column in benchmarks.items():
        if opinion := column["math_verify"]:
            scores.append(_score(name, {**opinion, "marked": column["marked"]}, second=True))
    return Run(
        label=label,
        directory=directory,
        model=f"{results['model']['name']}, revision {results['model']['revision']}",
        grader=results["grader"],
        second_opinion=results["second_opinion"],
        prompts=", ".join(
            dict.fromkeys(
                _WHOSE[column["prompts"]["origin"]] if column["prompts"] else "none"
                for column in benchmarks.values()
            )
        ),
        scores=scores,
        counts={name: (column["n"], column["correct"]) for name, column in benchmarks.items()},
        conditions={
            name: {
                "grader": results["grader"],
                "version of the benchmark": column["version"],
                "prompts": column["prompts"] and column["prompts"]["sha256"],
                "data": column["data"]["digest"],
            }
            for name, column in benchmarks.items()
        },
        notes=list(_notes(benchmarks, results.get("settings", {}))),
    )


def _score(name: str, column: Json, *, second: bool = False) -> AccuracyScore:
    low, high = map(float, column["interval"])
    exact, rounded = float(column["exact"]), float(column["rounded"])
    return AccuracyScore(name, second, exact, rounded, low, high, tuple(column["marked"]))


def _notes(benchmarks: Mapping[str, Json], settings: Json) -> Iterator[str]:
    """List the marks with their columns; then engine, dtype and context, which shift tenths."""
    marked: dict[str, list[str]] = {}
    for name, column in benchmarks.items():
        for mark in column["marks"]:
            marked.setdefault(mark, []).append(heading(name))
    for mark, columns in marked.items():
        yield f"{mark} ({', '.join(columns)})"
    names = [name for name in ("engine", "dtype", "context") if settings.get(name) is not None]
    if names:
        yield ", ".join(f"{name} {settings[name]}" for name in names)


# -- Training runs and audits ----------------------------------------------------------------


def run_directory(path: Path) -> Path:
    """Return the run that an evaluation is in, if it is in one; otherwise the path itself."""
    is_inside = path.name == EVALUATION_DIR and (path.parent / SETTINGS_FILE).is_file()
    return path.parent if is_inside else path


def read_eval_loss(run: Path) -> float | None:
    """Read the held-out loss after the last step; None if training has not come so far."""
    path = run / STATE_FILE
    if not path.is_file():
        return None
    state = read_json(path)
    try:
        last = [entry for entry in state["log_history"] if entry["step"] == state["max_steps"]]
        losses = [float(entry[EVAL_LOSS]) for entry in last if EVAL_LOSS in entry]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the log of train.py, found one that cannot be read ({error}): "
            "train again"
        ) from error
    if losses and not math.isfinite(losses[-1]):
        raise ValueError(f"{path}: expected a finite {EVAL_LOSS}, found {losses[-1]}: leave it out")
    return losses[-1] if losses else None


def read_audit(path: Path) -> list[dict[str, object]]:
    """Read an audit as rows: teacher, dataset, column, chunks, value in percent.

    Columns are "raw" and "bytes", the share of the teacher's vocabulary that is in the student's
    too (strings as written, and decoded), and "iou" and "ios" by chunks, 0 for the token level.
    """
    audit = read_json(path)
    rows: list[dict[str, object]] = []
    try:
        for one in audit["teachers"]:
            words = one["vocabulary_overlap"]
            values = [(kind, 0, float(words[kind]["teacher"])) for kind in ("raw", "bytes")]
            for overlap in ({"chunks": 0, **one["token_level"]}, *one["chunks"]):
                values += [(x, int(overlap["chunks"]), float(overlap[x])) for x in ("iou", "ios")]
            about = {
                "teacher": teacher_name(one["teacher"]),
                "dataset": Path(audit["dataset"]).name,
            }
            rows += [about | {"column": c, "chunks": n, "value": 100 * v} for c, n, v in values]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected what vocagnolm audit writes, found none or an unreadable {error}: "
            "audit again"
        ) from error
    return rows


def find_views(path: Path) -> Path | None:
    """Find the views that an inspection left in a directory, or the last ones of a run."""
    # Names of steps are padded with zeros, hence in order.
    steps = sorted((path / GUIDANCE_DIR).glob("step-*.json"))
    files = (file for file in (path / GUIDANCE_FILE, *reversed(steps)) if file.is_file())
    return next(files, None)


# -- The paper -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportedRow:
    """A row of one of the paper's tables: a teacher and a method, or a model.

    Attributes:
        name: as one writes it after --reported.
        table: "Table 1" or "Table 4".
        values: as printed, in percent, by column; columns without a number are left out.
    """

    name: str
    table: str
    values: Mapping[str, float]

    def value(self, column: str) -> float:
        """Return a number of the row.

        Raises:
            ValueError: it has no such column.
        """
        if column not in self.values:
            reject(
                f"{column!r} in the reported row {self.name!r} of {self.table}",
                ", ".join(map(repr, self.values)),
                "name one of them with --metric",
            )
        return self.values[column]


def read_reported(names: Sequence[str]) -> tuple[str, list[ReportedRow]]:
    """Read the source of the paper's numbers, and rows of its Tables 1 and 4.

    Raises:
        ValueError: there is no row of that name; the message lists those there are.
    """
    reported = read_json(REPORTED_FILE)
    rows = {}
    for table in reported["tables"]:
        for name, values in table["rows"].items():
            pairs = zip(table["columns"], values, strict=True)
            present = {column: value for column, value in pairs if value is not None}
            rows[name] = ReportedRow(name, table["table"], present)
    for name in names:
        if name not in rows:
            known = ", ".join(map(repr, rows))
            reject("--reported to name a row of the paper", repr(name), f"give one of {known}")
    return reported["source"], [rows[name] for name in dict.fromkeys(names)]


def paper_guidance() -> dict[str, Any]:
    """Read the names of the paper's models, and its Table 2."""
    return read_json(PAPER_FILE)


def teacher_name(reference: str) -> str:
    """Return the paper's name of a model, or else the last part of its own.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    own = Path(reference).name
    for name, others in paper_guidance()["models"].items():
        if own.casefold() in (name.casefold(), *map(str.casefold, others)):
            return str(name)
    return own
