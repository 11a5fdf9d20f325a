"""Reads the directories of evaluations and of training runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import TypeAlias

from vocagnolm.evaluation.tasks.benchmarks import AVERAGES, BENCHMARKS, PAPER_BENCHMARKS
from vocagnolm.evaluation.tasks.tasks import read_records
from vocagnolm.report.paper import Row, teacher_name
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import RUN_FILE, JsonObject, json_or_empty, read_json

# An item, by `idx`: the number of its right outputs, the hash of its prompt, and the gold.
Items: TypeAlias = dict[int, tuple[int, str, object]]
RESULTS_FILE, STATE_FILE = "results.json", "trainer_state.json"
# Next to an evaluation's results: the settings of all benchmarks with items.
_SETTINGS_FILE = "settings.json"
# Folders in a model's directory that have its evaluations. Those of other protocols than the
# paper's show the rest of the folder's name in their labels.
EVALUATION_FOLDER = "evaluation"
_OTHER_FOLDERS = ("evaluation-chat", "evaluation-sampled", "evaluation-chat-sampled")
# The columns of Table 1 come first, then those of other benchmarks, each once.
_COLUMNS = list(dict.fromkeys(chain(PAPER_BENCHMARKS, AVERAGES, BENCHMARKS)))
# Tables and figures use these names for the methods.
METHODS = {
    "vocagnolm": "VocAgnoLM",
    "uld": "ULD",
    "kld": "KLD",
    "cpt": "CPT",
    "rho1": "Rho-1",
    "chunk": "chunks",
    "random": "random tokens",
}
# These settings of a benchmark are read from its results.
_IN_RESULTS = {"version", "data_sha256", "prompts_sha256"}
# These settings may differ between two seeds of the same setting. The demo and the experiments also
# draw the corpus by the seed, so its digest and size are among them. Each seed may have its own
# models, whose paths tell them apart. `read_other_documents` compares the digest where it can.
_SEED_SETTINGS = {
    "seed",
    "data_seed",
    "corpus_digest",
    "blocks",
    "teacher_losses_sha256",
    "teacher_files",
    "evaluation",
}
_DIGEST = "corpus_digest"
# The digest of a corpus depends on its documents and on these options, which say how they are read.
_READING = (
    "student student_revision student_tokenizer student_chat_template teacher teacher_revision "
    "teacher_tokenizer teacher_chat_template chat_templates_sha256 teacher_losses "
    "teacher_reduction missing_losses dataset dataset_config dataset_split "
    "text_column eval_fraction max_length train_on uld_pairing"
).split()


@dataclass(frozen=True)
class Run:
    """The results of one evaluation."""

    label: str
    directory: Path
    # The name and revision of the model.
    model: str
    grader: str
    # The authors of the exemplars: "ours", "harness", "other" or "none", or several of them; or
    # "chat".
    prompts: str
    # Rows in Table 1's order. They have run, column (a benchmark's id or an average), value in
    # percent, rounded like the harness does, low and high of the 95 % interval, and marked: words
    # for why it cannot be compared with published numbers.
    scores: Sequence[Row]
    # Outputs per item, and how they are sampled; "" means greedy decoding.
    samples: int
    sampling: str
    # The number of items and of right outputs, by benchmark.
    counts: Mapping[str, tuple[int, int]]
    # By benchmark, everything that must be equal in two runs whose items are paired.
    conditions: Mapping[str, Row]
    # Reasons against comparing numbers with published ones, each with its columns, and the engine.
    notes: Sequence[str]

    def items(self, benchmark: str) -> Items:
        """Read the items of a benchmark, and compare their counts with `results.json`."""
        path = self.directory / f"{benchmark}.jsonl"
        if not path.exists():
            raise ValueError(f"{path} is missing, and {RESULTS_FILE} has its accuracy")
        items: Items = {}
        right = 0
        records = read_records(path)
        with _expected_fields(path):
            for (idx, _), record in records.items():
                is_right = record["correct"] is True
                right_before = items[idx][0] if idx in items else 0
                items[idx] = (right_before + is_right, record["prompt_sha256"], record["gold"])
                right += is_right
        # The two files are written one after the other, so a killed evaluation may leave a new one
        # next to an old one.
        expected_items, expected_right = self.counts[benchmark]
        expected_outputs = expected_items * self.samples
        if (len(items), len(records), right) != (expected_items, expected_outputs, expected_right):
            raise ValueError(
                f"{path}: expected {expected_outputs} outputs of {expected_items} items, "
                f"{expected_right} of them right, as in {RESULTS_FILE}, found {len(records)} of "
                f"{len(items)} and {right}: evaluate again"
            )
        return items


@dataclass(frozen=True)
class TrainingRun:
    """A run of vocagnolm train."""

    label: str
    # One of `METHODS`, or the name of a user's own method.
    method: str
    # Several teachers are joined by plus signs; "" means none.
    teacher: str
    # The options that define its setting, without the seed. Paths in them may be named after it.
    options: JsonObject
    # The digest of each corpus. None if the run trained on a user's own sequences.
    digest: object
    # JSON of `seed` and `data_seed`.
    seed: str
    batch_tokens: int
    # The state has log and cost. It is empty before the run is saved.
    state: JsonObject
    # The loss after the last step, over this many tokens. Both are None if training has not come
    # that far.
    eval_loss: float | None
    eval_tokens: int | None

    @property
    def name(self) -> str:
        """Method and teacher."""
        return f"{self.method}, {self.teacher}" if self.teacher else self.method

    def agrees(self, other: TrainingRun, option: str) -> bool:
        """Test whether two runs have the same value of an option, or one named after each seed."""
        value, other_value = self.options.get(option), other.options.get(option)
        # Weights & Biases returns 1.0 as 1, and these are equal.
        if value == other_value:
            return True
        names, other_names = _names_in(value), _names_in(other_value)
        if len(names) != len(other_names):
            return False
        seed, other_seed = json.loads(self.seed)[0], json.loads(other.seed)[0]
        for name, other_name in zip(names, other_names, strict=True):
            # All seeds may share a directory of one seed, so a seed that both have stays.
            if name == other_name:
                continue
            if _without_seed(name, seed) != _without_seed(other_name, other_seed):
                return False
        return True


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


def find_places(paths: Sequence[Path]) -> dict[str, tuple[Path | None, Path | None]]:
    """Find training runs and evaluations in directories, or in their `evaluation/`.

    Returns by label the directory with a run's settings and the directory with an evaluation's
    results. Chats and sampled outputs have their own labels.
    """
    # An entry has name, path, directory of the run and directory of the evaluation.
    entries: list[tuple[str, Path, Path | None, Path | None]] = []
    for path in paths:
        name = path.absolute().name
        run = path if _holds(path / RUN_FILE, {"method"}) else None
        evaluation = None
        for directory in (path / EVALUATION_FOLDER, path):
            if evaluation is None and holds_evaluation(directory):
                evaluation = directory
        other_folders = [folder for folder in _OTHER_FOLDERS if holds_evaluation(path / folder)]
        if run or evaluation:
            entries.append((name, path, run, evaluation))
        elif not other_folders:
            raise ValueError(
                f"{path}: has no {RUN_FILE} of a run and no {RESULTS_FILE} of an evaluation (also "
                f"not in {EVALUATION_FOLDER}/): {_advice(path)}"
            )
        for folder in other_folders:
            label = folder.replace(EVALUATION_FOLDER, name)
            entries.append((label, path / folder, None, path / folder))
    names = [entry[0] for entry in entries]
    places = {}
    for name, path, run, evaluation in entries:
        # If two directories have the same name, their paths distinguish them.
        label = name if names.count(name) == 1 else str(path)
        places[label] = run, evaluation
    return places


def holds_evaluation(directory: Path) -> bool:
    """Test for the directory of one of our evaluations."""
    return _holds(directory / RESULTS_FILE, {"benchmarks", "averages"})


def _holds(path: Path, keys: Set[str]) -> bool:
    """Test for a JSON file with the keys that ours have, because others may have its name."""
    return path.is_file() and keys <= read_json(path).keys()


def unfinished_evaluations(paths: Sequence[Path]) -> list[str]:
    """Return a sentence for each evaluation in models' directories that has no results yet."""
    sentences = []
    for path in paths:
        for folder in (EVALUATION_FOLDER, *_OTHER_FOLDERS):
            if _is_unfinished(path / folder):
                fault = f"{path.absolute().name}: its {folder} is unfinished"
                sentences.append(f"{fault}: run vocagnolm evaluate again.")
    return sentences


def _is_unfinished(directory: Path) -> bool:
    """Test for the directory of an evaluation that was begun, and has no results yet."""
    is_begun = "benchmarks" in json_or_empty(directory / _SETTINGS_FILE)
    return is_begun and not (directory / RESULTS_FILE).exists()


def _advice(path: Path) -> str:
    """Say what to give in place of a directory without a run or an evaluation."""
    if _is_unfinished(path) or unfinished_evaluations([path]):
        return "its evaluation is unfinished: run vocagnolm evaluate again"
    # The demo, for example, has a directory of runs for each seed, and links to some of them.
    runs = []
    for pattern in ("*", "*/*"):
        for directory in path.glob(pattern):
            if (directory / RUN_FILE).is_file() and not directory.is_symlink():
                runs.append(directory)
    return f"give runs in it, as {max(runs)}" if runs else "run vocagnolm train or evaluate first"


@contextmanager
def _expected_fields(path: Path) -> Iterator[None]:
    """Name the file if one of its fields is missing, or is not what vocagnolm writes there."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        fault = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path}: {fault}: it was edited, or another version of vocagnolm wrote it"
        ) from error


def read_run(label: str, directory: Path) -> Run:
    """Read the results of an evaluation."""
    path = directory / RESULTS_FILE
    results = read_json(path)
    with _expected_fields(path):
        return _run_of(label, directory, results)


def _run_of(label: str, directory: Path, results: JsonObject) -> Run:
    """Make a run from the results of an evaluation."""
    columns = results["benchmarks"] | results["averages"]
    scores = []
    authors = []
    counts = {}
    conditions = {}
    settings = results.get("settings", {})
    settings_of = _settings_by_benchmark(directory, settings)
    sampling = settings.get("sampling")
    # {why a number cannot be compared with a published one: columns}
    marks: dict[str, list[str]] = {}
    for name in in_order(columns):
        column = columns[name]
        low, high = column["interval"]
        row = {"run": label, "column": name, "value": column["exact"], "rounded": column["rounded"]}
        scores.append(row | {"low": low, "high": high, "marked": column["marked"]})
        if name in results["averages"]:
            continue
        is_chat = "chat" in column["marked"]
        prompts = column["prompts"] or {"origin": "none"}
        if is_chat:
            authors.append("chat")
        elif prompts["origin"] == "vocagnolm":
            authors.append("ours")
        else:
            authors.append(prompts["origin"])
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
    notes = [f"{mark} ({', '.join(names)})" for mark, names in marks.items()]
    # Accuracies differ by tenths of a point between engines and dtypes.
    engine = []
    for name in ("engine", "dtype", "context"):
        if settings.get(name) is not None:
            engine.append(f"{name} {settings[name]}")
    if engine:
        notes.append(", ".join(engine))
    return Run(
        label=label,
        directory=directory,
        model=f"{results['model']['name']}, revision {results['model']['revision']}",
        grader=results["grader"],
        prompts=", ".join(dict.fromkeys(authors)),
        scores=scores,
        samples=sampling["samples"] if sampling else 1,
        sampling=setting_text(sampling) if sampling else "",
        counts=counts,
        conditions=conditions,
        notes=notes,
    )


def _settings_by_benchmark(directory: Path, settings: JsonObject) -> dict[str, Row]:
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


def conditions_that_differ(first: Row, other: Row) -> list[str]:
    """Name the conditions in which two evaluations of one benchmark differ.

    What only the newer of them records counts as equal.
    """
    return [name for name in first if name in other and first[name] != other[name]]


def are_alike(first: Run, other: Run) -> bool:
    """Test whether two runs were asked and graded on the same benchmarks in the same way."""
    if first.conditions.keys() != other.conditions.keys():
        return False
    for name, conditions in first.conditions.items():
        if conditions_that_differ(conditions, other.conditions[name]):
            return False
    return True


def read_training(label: str, directory: Path) -> TrainingRun:
    """Read the settings and the log of a run of vocagnolm train."""
    path = directory / STATE_FILE
    state = read_json(path) if path.is_file() else {}
    # The evaluation after the last step. A resumed run may have logged it twice.
    evaluation: JsonObject = {}
    with _expected_fields(path):
        for entry in state.get("log_history", []):
            if entry["step"] == state["max_steps"] and "eval_loss" in entry:
                evaluation = entry
    path = directory / RUN_FILE
    settings = read_json(path)
    with _expected_fields(path):
        return _training_of(label, settings, state, evaluation)


def _training_of(
    label: str, settings: JsonObject, state: JsonObject, evaluation: JsonObject
) -> TrainingRun:
    """Make a run from its settings, its state and its last evaluation."""
    teachers: list[str] | str
    stores = settings.get("teacher_losses")
    if stores:
        # A store names the teacher that scored it.
        teachers = [store["teacher"] for store in stores]
    else:
        teachers = settings.get("teacher") or []
    if isinstance(teachers, str):
        teachers = [teachers]
    method = str(settings["method"])
    return TrainingRun(
        label=label,
        method=METHODS.get(method, method),
        teacher=" + ".join(map(teacher_name, teachers)),
        options={name: value for name, value in settings.items() if name not in _SEED_SETTINGS},
        digest=settings.get(_DIGEST),
        seed=json.dumps([settings.get("seed"), settings.get("data_seed")]),
        batch_tokens=settings["global_batch_tokens"],
        state=state,
        eval_loss=evaluation.get("eval_loss"),
        eval_tokens=evaluation.get("eval_tokens"),
    )


def _names_in(value: object) -> list[str]:
    """Split an option at the slashes of its paths and at the ends of its texts."""
    return re.split('[/"]', json.dumps(value, sort_keys=True))


def _without_seed(name: str, seed: int | None) -> str:
    """Replace the seed in the name of a directory or file that is named after it."""
    return re.sub(rf"seed[-_=]?{seed}(?!\d)", "seed", name)


def read_other_documents(first: TrainingRun, other: TrainingRun) -> bool:
    """Test whether two runs read other documents under the same names.

    False if their digests cannot tell, because the runs read in different ways.
    """
    names = list(_READING)
    # Some methods align the teacher's tokens in their own way.
    if first.teacher:
        names.append("method")
    if any(first.options.get(name) != other.options.get(name) for name in names):
        return False
    # The seed chooses the documents that are held out, and may draw those that have no name.
    depend_on_seed = first.options.get("eval_fraction") or not first.options.get("dataset")
    if depend_on_seed and first.seed != other.seed:
        return False
    digests = first.digest, other.digest
    return None not in digests and first.digest != other.digest


def _have_one_setting(first: TrainingRun, other: TrainingRun) -> bool:
    """Test whether two runs differ at most in their seed."""
    if read_other_documents(first, other):
        return False
    return all(first.agrees(other, option) for option in first.options | other.options)


def group_by_setting(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Group runs that differ only in their seed, under labels that distinguish settings.

    A run that was repeated with the same seed is not another seed of its setting, so each of the
    two makes a group of its own.
    """
    settings: list[list[TrainingRun]] = []
    # Those that other seeds may join.
    open_settings: list[list[TrainingRun]] = []
    for run in runs:
        same_seed = [other for other in runs if other.seed == run.seed]
        if sum(_have_one_setting(run, other) for other in same_seed) > 1:
            settings.append([run])
            continue
        for setting in open_settings:
            if all(_have_one_setting(run, member) for member in setting):
                setting.append(run)
                break
        else:
            setting = [run]
            settings.append(setting)
            open_settings.append(setting)
    # A label is method and teacher. If several settings have the same, it also has the options in
    # which they differ.
    namesakes: dict[str, list[TrainingRun]] = {}
    for setting in settings:
        namesakes.setdefault(setting[0].name, []).append(setting[0])
    texts_of = {name: differing(firsts) for name, firsts in namesakes.items()}
    labels = []
    for setting in settings:
        first = setting[0]
        place = namesakes[first.name].index(first)
        parts = [first.name]
        for name, texts in texts_of[first.name].items():
            parts.append(f"{name} {texts[place]}")
        labels.append(", ".join(parts))
    grouped = {}
    for label, setting in zip(labels, settings, strict=True):
        # Repeated runs differ in no option, so their own labels distinguish them.
        is_ambiguous = labels.count(label) > 1
        grouped[f"{label}, {setting[0].label}" if is_ambiguous else label] = setting
    return grouped


def differing(runs: Sequence[TrainingRun]) -> dict[str, list[str]]:
    """Return the options in which runs differ, by name: a text for each run.

    The digest of the documents is among them if runs read others under the same names. Runs whose
    digest cannot tell have a dash.
    """
    # A dictionary keeps the order of the options, with each once.
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.options)
    texts = {}
    for name in names:
        if not all(run.agrees(runs[0], name) for run in runs):
            texts[name] = [setting_text(run.options.get(name)) for run in runs]
    digests = ["-"] * len(runs)
    for (place, run), (other_place, other) in combinations(enumerate(runs), 2):
        if read_other_documents(run, other):
            digests[place] = setting_text(run.digest)
            digests[other_place] = setting_text(other.digest)
    if any(digest != "-" for digest in digests):
        texts[_DIGEST] = digests
    return texts


def setting_text(value: object) -> str:
    """Format a setting without a machine's paths."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(entry)}" for name, entry in value.items())
    return "-" if value is None else public_name(str(value))
