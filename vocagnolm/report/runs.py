"""Read the directories of evaluations and of training runs, and the paper's numbers."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import read_records
from vocagnolm.hub import public_name
from vocagnolm.io import ASSETS, RUN_FILE, JsonObject, read_json

Row: TypeAlias = dict[str, Any]
# Of each item, by `idx`: whether it is right, the hash of its prompt, its gold.
Items: TypeAlias = dict[int, tuple[bool, str, object]]
RESULTS_FILE, STATE_FILE = "results.json", "trainer_state.json"
REPORTED_FILE = ASSETS / "reported.json"
# Of evaluations, beside a model.
EVALUATION_FOLDER, CHAT_FOLDER = "evaluation", "evaluation-chat"
# Table 1's columns, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys((*PAPER_BENCHMARKS, *AVERAGES, *BENCHMARKS)))
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
            raise ValueError(
                f"{path}: expected {counts[0]} items, {counts[1]} of them right, as in "
                f"{RESULTS_FILE}, found {found[0]} and {found[1]}: evaluate again"
            )
        return items


@dataclass(frozen=True)
class TrainingRun:
    """A run of vocagnolm train."""

    label: str
    # As in `METHODS`, or a user's own.
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
    # After the last step, and of how many tokens; None if training has not come so far.
    eval_loss: float | None
    eval_tokens: int | None

    @property
    def name(self) -> str:
        """Method and teacher."""
        return f"{self.method}, {self.teacher}" if self.teacher else self.method


def heading(column: str) -> str:
    """Return the heading of a column.

    >>> heading("tabmwp"), heading("AVG w/o SAT")
    ('TAB', 'AVG w/o SAT')
    """
    return BENCHMARKS[column].column if column in BENCHMARKS else column


def in_order(columns: Iterable[str]) -> list[str]:
    """Sort columns as in Table 1, each once; those that the table does not have come last.

    >>> in_order(["mine", "demo", "AVG", "math", "gsm8k", "math"])
    ['gsm8k', 'math', 'AVG', 'demo', 'mine']
    """
    known = {name: place for place, name in enumerate(_COLUMNS)}
    return sorted(set(columns), key=lambda name: (known.get(name, len(known)), name))


def find_places(paths: Sequence[Path]) -> dict[str, tuple[Path | None, Path | None]]:
    """Find runs of vocagnolm train and evaluations in directories, or in their `evaluation/`.

    Returns by label the directory with the settings of a run, and the one with the results of an
    evaluation; chats have labels of their own.
    """
    found: list[tuple[str, Path, Path | None, Path | None]] = []
    for path in paths:
        name, chat = path.absolute().name, path / CHAT_FOLDER
        run = path if (path / RUN_FILE).is_file() else None
        places = [path / EVALUATION_FOLDER, path]
        evaluation = next((place for place in places if (place / RESULTS_FILE).is_file()), None)
        has_chat = (chat / RESULTS_FILE).is_file()
        if run or evaluation:
            found.append((name, path, run, evaluation))
        elif not has_chat:
            expected = f"{RUN_FILE} or {RESULTS_FILE} in it or in its {EVALUATION_FOLDER}/"
            raise ValueError(f"{path}: no {expected}: run vocagnolm train or evaluate first")
        if has_chat:
            found.append((f"{name}-chat", chat, None, chat))
    names = [name for name, *_ in found]
    return {
        name if names.count(name) == 1 else str(path): (run, evaluation)
        for name, path, run, evaluation in found
    }


def read_run(label: str, directory: Path) -> Run:
    """Read the results of an evaluation."""
    results = read_json(directory / RESULTS_FILE)
    columns = results["benchmarks"] | results["averages"]
    scores, authors, counts, conditions = [], [], {}, {}
    marks: dict[str, list[str]] = {}
    for name in in_order(columns):
        column = columns[name]
        low, high = column["interval"]
        row = {"run": label, "column": name, "value": column["exact"], "rounded": column["rounded"]}
        scores.append(row | {"low": low, "high": high, "marked": column["marked"]})
        if name in results["averages"]:
            continue
        is_chat, prompts = "chat" in column["marked"], column["prompts"] or {"origin": "none"}
        author = "ours" if prompts["origin"] == "vocagnolm" else prompts["origin"]
        authors.append("chat" if is_chat else author)
        counts[name] = column["n"], column["correct"]
        conditions[name] = {
            "grader": results["grader"],
            "protocol": "chat" if is_chat else "the paper's",
            "version of the benchmark": column["version"],
            "prompts": prompts.get("sha256"),
            "data": column["data"]["digest"],
        }
        for mark in column["marks"]:
            marks.setdefault(mark, []).append(heading(name))
    notes = [f"{mark} ({', '.join(names)})" for mark, names in marks.items()]
    settings = results.get("settings", {})
    # These shift tenths.
    shifting = [x for x in ("engine", "dtype", "context") if settings.get(x) is not None]
    if shifting:
        notes.append(", ".join(f"{name} {settings[name]}" for name in shifting))
    model = f"{results['model']['name']}, revision {results['model']['revision']}"
    prompts = ", ".join(dict.fromkeys(authors))
    about = (label, directory, model, results["grader"], prompts)
    return Run(*about, scores, counts, conditions, notes)


def read_training(label: str, directory: Path) -> TrainingRun:
    """Read the settings and the log of a run of vocagnolm train."""
    settings = read_json(directory / RUN_FILE)
    path = directory / STATE_FILE
    state = read_json(path) if path.is_file() else {}
    last: JsonObject = {}
    for entry in state.get("log_history", []):
        if entry["step"] == state["max_steps"] and "eval_loss" in entry:
            last = entry
    # A store names the teacher that scored it.
    stores = settings.get("teacher_losses")
    teachers = [store["teacher"] for store in stores] if stores else settings.get("teacher") or []
    teachers = [teachers] if isinstance(teachers, str) else teachers
    # The identity of a setting: all options but those of a seed, and paths without their "seedN".
    kept = json.dumps({name: x for name, x in settings.items() if name not in _OF_A_SEED})
    in_paths = _SEED_IN_A_PATH.findall(json.dumps(settings))

    def number(text: str) -> float:
        # Weights & Biases gives 1.0 back as 1.
        return int(float(text)) if float(text).is_integer() else float(text)

    method = str(settings["method"])
    return TrainingRun(
        label=label,
        method=METHODS.get(method, method),
        teacher=" + ".join(map(teacher_name, teachers)),
        options=json.loads(_SEED_IN_A_PATH.sub("seed", kept), parse_float=number),
        seed=json.dumps([settings.get("seed"), settings.get("data_seed"), in_paths]),
        batch_tokens=settings["global_batch_tokens"],
        state=state,
        eval_loss=last.get("eval_loss"),
        eval_tokens=last.get("eval_tokens"),
    )


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
        place = alike.index(first)
        apart = [f"{name} {texts[place]}" for name, texts in differing(alike).items()]
        labels.append(", ".join([first.name, *apart]))
    return {
        f"{label}, {setting[0].label}" if labels.count(label) > 1 else label: setting
        for label, setting in zip(labels, settings, strict=True)
    }


def differing(runs: Sequence[TrainingRun]) -> dict[str, list[str]]:
    """Write the options in which runs are not all the same, by name: a text for each run."""
    names = dict.fromkeys(name for run in runs for name in run.options)
    values = {name: [run.options.get(name) for run in runs] for name in names}
    return {
        name: [setting_text(value) for value in found]
        for name, found in values.items()
        if found != found[:1] * len(found)
    }


def setting_text(value: object) -> str:
    """Write a setting without the paths of a machine."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(one)}" for name, one in value.items())
    return "-" if value is None else public_name(str(value))


def read_reported(names: Sequence[str]) -> list[Row]:
    """Read rows of the paper's tables: row, table, column, reported; "Table 2" names all of one."""
    known: dict[str, list[Row]] = {}
    for table in read_json(REPORTED_FILE)["tables"]:
        for row, values in table["rows"].items():
            own = {"row": row, "table": table["table"]}
            for column, value in zip(table["columns"], values, strict=True):
                if value is not None:
                    cell = own | {"column": column, "reported": value}
                    for name in own.values():
                        known.setdefault(name, []).append(cell)
    found: list[Row] = []
    for name in names:
        if name not in known:
            rows = ", ".join(map(repr, known))
            raise ValueError(f"--reported {name!r} is no row or table of the paper: {rows}")
        found += [cell for cell in known[name] if cell not in found]
    return found


def teacher_name(reference: str) -> str:
    """Return the paper's name of a model, or else the last part of its own.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    own = Path(reference).name
    for name, others in read_json(REPORTED_FILE)["models"].items():
        if own.casefold() in (name.casefold(), *map(str.casefold, others)):
            return str(name)
    return own
