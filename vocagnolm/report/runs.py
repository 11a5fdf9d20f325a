"""Read the directories of evaluations, training runs and audits."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from vocagnolm.evaluation.records import read_records
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.host.manifest import unsealed
from vocagnolm.host.options import raise_first, wrong_values
from vocagnolm.host.settings import RUN_FILE
from vocagnolm.host.trackers import CHAT_FOLDER, EVALUATION_FOLDER
from vocagnolm.io import JsonObject, read_asset, read_json
from vocagnolm.report.paper import teacher_name

Row = dict[str, object]
# Names, tables and texts of comparisons and audits.
TEXTS = read_asset("analysis.yaml")
RESULTS_FILE, AUDIT_FILE, GUIDANCE_FILE = "results.json", "audit.json", "guidance.json"
_GUIDANCE_DIR = "guidance"
# Of a state, beside its log.
_NUMBERS = ("global_step", "max_steps", "total_flos")
# The column of runs without an evaluation.
EVAL_LOSS = "eval_loss"
# Table 1's columns, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys((*PAPER_BENCHMARKS, *AVERAGES, *BENCHMARKS)))
_WHOSE = {"vocagnolm": "ours", "harness": "harness", "other": "other"}


@dataclass(frozen=True)
class Run:
    """The results of one evaluation."""

    # Unlike that of any other run of the comparison.
    label: str
    # Holds `results.json` and one file of items per benchmark.
    directory: Path
    # Name and revision.
    model: str
    grader: str
    second_opinion: str
    # Authors of the exemplars: "ours", "harness", "other", "none", or several of them.
    prompts: str
    # Rows in Table 1's order, the second opinion's last: column (a benchmark's id or an average),
    # second, value in percent, rounded as the harness does, low and high of the 95 % interval, and
    # marked: words for why it may not stand beside a published number.
    scores: Sequence[Row]
    # Items and right answers by benchmark.
    counts: Mapping[str, tuple[int, int]]
    # By benchmark, all that must be equal in two runs whose items are paired.
    conditions: Mapping[str, Row]
    # Reasons not to put numbers beside published ones, each with its columns; engine.
    notes: Sequence[str]

    def items(self, benchmark: str) -> dict[int, tuple[bool, str, object]]:
        """Read verdict, hash of the prompt and gold of the items of a benchmark, by `idx`.

        Raises:
            ValueError: the file is missing, damaged, or contradicts `results.json`.
        """
        path = self.directory / f"{benchmark}.jsonl"
        if not path.is_file():
            reject(path, "none", "run evaluate_math.py again")
        records = read_records(path)
        with readable(path, "the items of evaluate_math.py"):
            items = {
                idx: (record["correct"] is True, record["prompt_sha256"], record["gold"])
                for idx, record in records.items()
            }
        found = len(items), sum(correct for correct, *_ in items.values())
        if found != (counts := self.counts[benchmark]):
            expected = f"{counts[0]} items, {counts[1]} of them right, as in {RESULTS_FILE}"
            reject(f"{expected}, in {path}", f"{found[0]} and {found[1]}", "evaluate again")
        return items


def reject(expected: object, found: object, advice: str) -> NoReturn:
    """Raise the ValueError of a wrong directory or option, in one line."""
    raise ValueError(f"expected {expected}, found {found}: {advice}")


@contextmanager
def readable(path: Path, expected: str) -> Iterator[None]:
    """Turn all that content of a wrong shape raises into one line that names the file."""
    try:
        yield
        return
    except KeyError as error:
        found = f"none or an unknown {error}"
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        found = str(error)
    raise ValueError(f"{path}: expected {expected}, found {found}: make it again or leave it out")


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
    return sorted(set(columns), key=_COLUMNS.index)


# -- Evaluations -----------------------------------------------------------------------------


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the results of evaluations: their directories, or models' that hold `evaluation/`.

    Raises:
        ValueError: results are missing or damaged, or two paths lead to the same.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        directory = find_evaluation(path)
        if not directory:
            where = f"{RESULTS_FILE} in {path} or in its {EVALUATION_FOLDER}/"
            reject(where, "none", "run evaluate_math.py first")
        if directory in found:
            reject("different runs", f"{directory} twice, as {path} too", "give it once")
        found[directory] = path
    # A run is called by its model's directory; runs of the same name by their whole paths.
    ours, about = (EVALUATION_FOLDER, CHAT_FOLDER), len(EVALUATION_FOLDER)
    names = [x.parent.name + x.name[about:] if x.name in ours else x.name for x in found]
    return [
        _read_run(directory, name if names.count(name) == 1 else str(path))
        for (directory, path), name in zip(found.items(), names, strict=True)
    ]


def find_evaluation(path: Path) -> Path | None:
    """Find an evaluation in the `evaluation/` of a directory, or in the directory itself."""
    places = (path / EVALUATION_FOLDER, path)
    return next((x.resolve() for x in places if (x / RESULTS_FILE).is_file()), None)


def with_chats(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield directories, and behind each its evaluation in a chat, if it has one."""
    for path in paths:
        chat = find_evaluation(path / CHAT_FOLDER)
        if not chat or find_evaluation(path) or (path / RUN_FILE).is_file():
            yield path
        if chat:
            yield path / CHAT_FOLDER


def _read_run(directory: Path, label: str) -> Run:
    path = directory / RESULTS_FILE
    with readable(path, "the results of evaluate_math.py"):
        results = unsealed(json.loads(path.read_bytes()))
        benchmarks = {name: results["benchmarks"][name] for name in in_order(results["benchmarks"])}
        # The first grader judges benchmarks and averages, the second one some benchmarks.
        columns = benchmarks | results["averages"]
        scores = [_score(name, columns[name], second=False) for name in in_order(columns)]
        scores += [
            _score(name, opinion | {"marked": column["marked"]}, second=True)
            for name, column in benchmarks.items()
            if (opinion := column["math_verify"])
        ]
        authors, conditions = [], {}
        for name, column in benchmarks.items():
            is_chat, prompts = "chat" in column["marked"], column["prompts"]
            authors.append("chat" if is_chat else _WHOSE[prompts["origin"]] if prompts else "none")
            conditions[name] = {
                "grader": results["grader"],
                "protocol": "chat" if is_chat else "the paper's",
                "version of the benchmark": column["version"],
                "prompts": prompts and prompts["sha256"],
                "data": column["data"]["digest"],
            }
        return Run(
            label=label,
            directory=directory,
            model=f"{results['model']['name']}, revision {results['model']['revision']}",
            grader=results["grader"],
            second_opinion=results["second_opinion"],
            prompts=", ".join(dict.fromkeys(authors)),
            scores=scores,
            counts={name: (column["n"], column["correct"]) for name, column in benchmarks.items()},
            conditions=conditions,
            notes=_notes(benchmarks, results.get("settings", {})),
        )


def _score(name: str, column: JsonObject, *, second: bool) -> Row:
    raise_first(wrong_values(column, {"marked": list[str]}))
    low, high = map(float, column["interval"])
    values = {"value": float(column["exact"]), "rounded": float(column["rounded"])}
    interval = {"low": low, "high": high, "marked": tuple(column["marked"])}
    return {"column": name, "second": second} | values | interval


def _notes(benchmarks: JsonObject, settings: JsonObject) -> list[str]:
    """List the marks with their columns; then engine, dtype and context, which shift tenths."""
    marked: dict[str, list[str]] = {}
    for name, column in benchmarks.items():
        for mark in column["marks"]:
            marked.setdefault(mark, []).append(heading(name))
    notes = [f"{mark} ({', '.join(columns)})" for mark, columns in marked.items()]
    shifting = [x for x in ("engine", "dtype", "context") if settings.get(x) is not None]
    if shifting:
        notes.append(", ".join(f"{name} {settings[name]}" for name in shifting))
    return notes


# -- Training runs and audits ----------------------------------------------------------------


def run_directory(path: Path) -> Path:
    """Return the run that an evaluation is in, if it is in one; otherwise the path itself."""
    # The present directory has a name, and so has the one above.
    path = path if path.name.strip(".") else path.resolve()
    is_inside = path.name == EVALUATION_FOLDER and (path.parent / RUN_FILE).is_file()
    return path.parent if is_inside else path


def read_state(run: Path) -> JsonObject:
    """Read the log and the cost of a run of train.py; nothing before it is saved."""
    path = run / "trainer_state.json"
    state = read_json(path) if path.is_file() else {}
    with readable(path, "the log of train.py, of numbers"):
        entries = ({x: state.get(x, 0) for x in _NUMBERS}, *state.get("log_history", ()))
        # Raises for anything else.
        [value + 0.0 for entry in entries for value in entry.values()]
    return state


def read_eval_loss(run: Path) -> list[Row]:
    """Read the held-out loss after the last step: no row if training has not come so far."""
    if not (state := read_state(run)):
        return []
    with readable(run / "trainer_state.json", f"the log of train.py with a finite {EVAL_LOSS}"):
        last = [entry for entry in state["log_history"] if entry["step"] == state["max_steps"]]
        losses = [float(entry[EVAL_LOSS]) for entry in last if EVAL_LOSS in entry]
        if losses and not math.isfinite(losses[-1]):
            raise ValueError(losses[-1])
    return [{"column": EVAL_LOSS, "value": loss, "marked": ()} for loss in losses[-1:]]


def read_audit(path: Path) -> list[Row]:
    """Read an audit: the rows of its teachers, with `teacher` and `dataset`."""
    audit = read_json(path)
    with readable(path, "what vocagnolm audit writes"):
        dataset = Path(audit["dataset"]).name
        return [
            {"teacher": teacher_name(one["teacher"]), "dataset": dataset, **row}
            for one in audit["teachers"]
            for row in teacher_rows(one)
        ]


def teacher_rows(audited: JsonObject) -> list[Row]:
    """Read an audited teacher as rows: column, chunks, value, low and high in percent.

    Columns are "raw" and "bytes", the share of the teacher's vocabulary that is in the student's
    too (strings as written, and decoded), and "iou" and "ios" by chunks, 0 for the token level.
    """

    def row(column: str, chunks: int, share: float, error: float = math.nan) -> Row:
        value, half = 100 * float(share), 196 * error
        interval = {"low": value - half, "high": value + half}
        return {"column": column, "chunks": int(chunks), "value": value, **interval}

    words = audited["vocabulary_overlap"]
    rows = [row(kind, 0, words[kind]["teacher"]) for kind in ("raw", "bytes")]
    rows += [row(x, 0, audited["token_level"][x]) for x in ("iou", "ios")]
    # Without a standard error there was a single sequence.
    return rows + [
        row(x, one["chunks"], one[x], one.get(f"{x}_standard_error", 0.0))
        for one in audited["chunks"]
        for x in ("iou", "ios")
    ]


def find_views(path: Path) -> Path | None:
    """Find the views that an inspection left in a directory, or the last ones of a run."""
    # Names of steps are padded with zeros, hence in order.
    steps = sorted((path / _GUIDANCE_DIR).glob("step-*.json"))
    return next(iter([*path.glob(GUIDANCE_FILE), *reversed(steps)]), None)
