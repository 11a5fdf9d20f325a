"""Read the directories of evaluations and of training runs, and the paper's numbers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from vocagnolm.evaluation.runner import read_records
from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.io import ASSETS, RUN_FILE, JsonObject, read_json
from vocagnolm.run.card import public_name

Row: TypeAlias = dict[str, Any]
# Of each item, by `idx`: whether it is right, the hash of its prompt, its gold.
Items: TypeAlias = dict[int, tuple[bool, str, object]]
RESULTS_FILE, STATE_FILE = "results.json", "trainer_state.json"
REPORTED_FILE = ASSETS / "reported.json"
# Of evaluations, beside a model.
EVALUATION_FOLDER, CHAT_FOLDER = "evaluation", "evaluation-chat"
# Table 1's columns, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys((*PAPER_BENCHMARKS, *AVERAGES, *BENCHMARKS)))
_AUTHORS = {"vocagnolm": "ours", "harness": "harness", "other": "other"}
# Names of the methods in tables and figures.
METHODS = {
    "vocagnolm": "VocAgnoLM",
    "uld": "ULD",
    "kld": "KLD",
    "cpt": "CPT",
    "rho1": "Rho-1",
    "chunk": "chunks",
    "random": "random tokens",
}
_OF_A_SEED = {"seed", "data_seed", "corpus_digest", "blocks", "teacher_losses_sha256"}
_SEED_IN_A_PATH = re.compile(r"seed[-_=]?\d+")


@dataclass(frozen=True)
class Run:
    """The results of one evaluation."""

    label: str
    directory: Path
    # Name and revision.
    model: str
    grader: str
    # Authors of the exemplars: "ours", "harness", "other", "none", or several of them; or "chat".
    prompts: str
    # Rows in Table 1's order: run, column (a benchmark's id or an average), value in percent,
    # rounded as the harness does, low and high of the 95 % interval, and marked: words for why it
    # may not stand beside a published number.
    scores: Sequence[Row]
    # Items and right answers by benchmark.
    counts: Mapping[str, tuple[int, int]]
    # By benchmark, all that must be equal in two runs whose items are paired.
    conditions: Mapping[str, Row]
    # Reasons not to put numbers beside published ones, each with its columns; engine.
    notes: Sequence[str]

    def items(self, benchmark: str) -> Items:
        """Read the items of a benchmark, and compare their counts with `results.json`."""
        path = self.directory / f"{benchmark}.jsonl"
        items = {
            idx: (record["correct"] is True, record["prompt_sha256"], record["gold"])
            for idx, record in read_records(path).items()
        }
        found = len(items), sum(correct for correct, *_ in items.values())
        if found != (counts := self.counts[benchmark]):
            expected = f"{counts[0]} items, {counts[1]} of them right, as in {RESULTS_FILE}"
            reject(f"{expected}, in {path}", f"{found[0]} and {found[1]}", "evaluate again")
        return items


@dataclass(frozen=True)
class TrainingRun:
    """A run of train.py."""

    label: str
    # As in `METHODS`.
    method: str
    # Who guided it, joined if there are several; "" for nobody.
    teacher: str
    # All that makes its setting, so without seeds.
    options: JsonObject
    # Its seeds, those in paths included.
    seed: str
    batch_tokens: int
    # Log and cost; empty before the run is saved.
    state: JsonObject

    @property
    def name(self) -> str:
        """Method and teacher."""
        return f"{self.method}, {self.teacher}" if self.teacher else self.method

    @property
    def eval_loss(self) -> float | None:
        """The held-out loss after the last step; None if training has not come so far."""
        for entry in reversed(self.state.get("log_history", [])):
            if entry["step"] == self.state["max_steps"] and "eval_loss" in entry:
                return float(entry["eval_loss"])
        return None


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
    return sorted(set(columns), key=_COLUMNS.index)


# -- Directories -----------------------------------------------------------------------------


def find_places(paths: Sequence[Path]) -> dict[str, tuple[Path | None, Path | None]]:
    """Find the directories of runs of train.py and of evaluations, or their `evaluation/`.

    Returns by label the directory with the settings of a run, and the one with the results of an
    evaluation; chats have labels of their own.
    """
    found: list[tuple[str, Path, Path | None, Path | None]] = []
    for path in paths:
        before, home = len(found), path.absolute()
        if home.name == CHAT_FOLDER:
            found.append((f"{home.parent.name}-chat", path, None, home))
            continue
        if home.name == EVALUATION_FOLDER:
            home = home.parent
        run = home if (home / RUN_FILE).is_file() else None
        places = [home / EVALUATION_FOLDER, home]
        evaluation = next((place for place in places if (place / RESULTS_FILE).is_file()), None)
        if run or evaluation:
            found.append((home.name, path, run, evaluation))
        chat = home / CHAT_FOLDER
        if (chat / RESULTS_FILE).is_file():
            found.append((f"{home.name}-chat", path / CHAT_FOLDER, None, chat))
        if len(found) == before:
            expected = f"{RUN_FILE} or {RESULTS_FILE} in {path} or in its {EVALUATION_FOLDER}/"
            reject(expected, "none", "run train.py or evaluate_math.py first")
    names = [name for name, *_ in found]
    return {
        name if names.count(name) == 1 else str(path): (run, evaluation)
        for name, path, run, evaluation in found
    }


# -- Evaluations -----------------------------------------------------------------------------


def read_run(label: str, directory: Path) -> Run:
    """Read the results of an evaluation."""
    results = read_json(directory / RESULTS_FILE)
    benchmarks = {name: results["benchmarks"][name] for name in in_order(results["benchmarks"])}
    columns = benchmarks | results["averages"]
    scores = []
    for name in in_order(columns):
        column = columns[name]
        row = {"run": label, "column": name, "value": column["exact"], "rounded": column["rounded"]}
        row["low"], row["high"] = column["interval"]
        scores.append({**row, "marked": column["marked"]})
    authors, conditions = [], {}
    for name, column in benchmarks.items():
        is_chat, prompts = "chat" in column["marked"], column["prompts"]
        authors.append("chat" if is_chat else _AUTHORS[prompts["origin"]] if prompts else "none")
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
        prompts=", ".join(dict.fromkeys(authors)),
        scores=scores,
        counts={name: (column["n"], column["correct"]) for name, column in benchmarks.items()},
        conditions=conditions,
        notes=_notes(benchmarks, results.get("settings", {})),
    )


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


# -- Training runs ---------------------------------------------------------------------------


def read_training(label: str, directory: Path) -> TrainingRun:
    """Read the settings and the log of a run of train.py."""
    settings = read_json(directory / RUN_FILE)
    path = directory / STATE_FILE
    # A store names the teacher that scored it.
    stores = settings.get("teacher_losses")
    teachers = [store["teacher"] for store in stores] if stores else settings.get("teacher") or []
    teachers = [teachers] if isinstance(teachers, str) else teachers
    # The identity of a setting: all options but those of a seed, and paths without their "seedN".
    kept = json.dumps({name: x for name, x in settings.items() if name not in _OF_A_SEED})
    in_paths = _SEED_IN_A_PATH.findall(json.dumps(settings))
    return TrainingRun(
        label=label,
        method=METHODS[settings["method"]],
        teacher=" + ".join(map(teacher_name, teachers)),
        options=json.loads(_SEED_IN_A_PATH.sub("seed", kept), parse_float=_number),
        seed=json.dumps([settings.get("seed"), settings.get("data_seed"), in_paths]),
        batch_tokens=settings["global_batch_tokens"],
        state=read_json(path) if path.is_file() else {},
    )


def _number(text: str) -> float:
    # Weights & Biases gives 1.0 back as 1.
    value = float(text)
    return int(value) if value.is_integer() else value


def group_by_setting(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Group runs that differ in nothing but their seed, under labels that distinguish settings.

    A run that was repeated is no seed of a setting: it stands beside the other.
    """
    keys = [(json.dumps(run.options, sort_keys=True), run.seed) for run in runs]
    groups: dict[str, list[TrainingRun]] = {}
    for key, run in zip(keys, runs, strict=True):
        is_repeated = keys.count(key) > 1
        groups.setdefault(run.label if is_repeated else key[0], []).append(run)
    settings = list(groups.values())
    labels = []
    for first, *_ in settings:
        # By method and teacher, and where these are equal, by their options.
        alike = [other[0] for other in settings if other[0].name == first.name]
        apart = [f"{name} {setting_text(first.options.get(name))}" for name in differing(alike)]
        labels.append(", ".join([first.name, *apart]))
    return {
        f"{label}, {setting[0].label}" if labels.count(label) > 1 else label: setting
        for label, setting in zip(labels, settings, strict=True)
    }


def differing(runs: Sequence[TrainingRun]) -> list[str]:
    """List the options in which some runs are not all the same, in the order of `run.json`."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    return [
        name
        for name in names
        if any(run.options.get(name) != runs[0].options.get(name) for run in runs)
    ]


def setting_text(value: object) -> str:
    """Write a setting without the paths of a machine."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(one)}" for name, one in value.items())
    return "-" if value is None else public_name(str(value))


# -- The paper -------------------------------------------------------------------------------


@cache
def _paper() -> JsonObject:
    return read_json(REPORTED_FILE)


def read_reported(names: Sequence[str]) -> list[Row]:
    """Read rows of the paper's tables: row, table, column, reported; "Table 2" names all of one."""
    tables = {table["table"]: table for table in _paper()["tables"]}
    table_of = {row: table for table in tables.values() for row in table["rows"]}
    rows: list[str] = []
    for name in names:
        if name not in tables and name not in table_of:
            known = ", ".join(map(repr, [*tables, *table_of]))
            expected = "--reported to name a row or a table of the paper"
            reject(expected, repr(name), f"give one of {known}")
        rows += tables[name]["rows"] if name in tables else [name]
    found = []
    for row in dict.fromkeys(rows):
        table = table_of[row]
        values = dict(zip(table["columns"], table["rows"][row], strict=True))
        for column, value in values.items():
            if value is not None:
                own = {"row": row, "table": table["table"]}
                found.append({**own, "column": column, "reported": value})
    return found


def teacher_name(reference: str) -> str:
    """Return the paper's name of a model, or else the last part of its own.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    own = Path(reference).name
    for name, others in _paper()["models"].items():
        if own.casefold() in (name.casefold(), *map(str.casefold, others)):
            return str(name)
    return own
