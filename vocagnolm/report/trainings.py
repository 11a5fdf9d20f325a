"""Reads runs of vocagnolm train, and groups those that differ only in their seed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from vocagnolm.fields import listed, options_of
from vocagnolm.report.paper import teacher_name
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import LOG_FILE, RUN_FILE, JsonObject, read_json
from vocagnolm.training.options import DataOptions, LoadOptions, ModelOptions, PackOptions

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
STATE_FILE = "trainer_state.json"
# These settings may differ between two seeds of the same setting. The demo and the experiments also
# draw the corpus by the seed, so its size is among them. Each seed may have its own models, whose
# paths tell them apart. Earlier versions recorded the weights, and then the sizes of files.
_SEED_SETTINGS = {
    "seed",
    "data_seed",
    "blocks",
    "teacher_losses_sha256",
    "student_hashes",
    "teacher_hashes",
    "teacher_weights_sha256",
    "teacher_files",
    "student_weights",
    "evaluation",
}
# The digest of a corpus depends on its documents and on how they are read.
DIGEST = "corpus_digest"
_READING = {"method", "teacher_reduction", "uld_pairing", "chat_templates_sha256"}
for _option in options_of(ModelOptions, LoadOptions, DataOptions, PackOptions):
    _READING.add(_option.name)


@dataclass(frozen=True)
class TrainingRun:
    """A run of vocagnolm train."""

    label: str
    # One of `METHODS`, or the name of a user's own method.
    method: str
    # Several teachers are joined by plus signs; "" means none.
    teacher: str
    # `seed` and `data_seed`, and all other settings. Paths in them may be named after the seed.
    seed: tuple[int | None, int | None]
    options: JsonObject
    # The state has log and cost. It is empty before the run is saved.
    state: JsonObject
    # The loss after the last step, over so many tokens in so many segments. They are None if
    # training has not come that far, and segments also in logs of version 0.1.
    eval_loss: float | None
    eval_tokens: int | None
    eval_segments: int | None

    @property
    def name(self) -> str:
        """Method and teacher."""
        return f"{self.method}, {self.teacher}" if self.teacher else self.method


def read_training(label: str, directory: Path) -> TrainingRun:
    """Read the settings and the log of a run."""
    settings = read_json(directory / RUN_FILE)
    state = _read_state(directory, settings)
    # The evaluation after the last step. A resumed run may have logged it twice.
    evaluation: JsonObject = {}
    for entry in state.get("log_history", []):
        if entry["step"] == state.get("max_steps") and "eval_loss" in entry:
            evaluation = entry
    teachers = listed(settings.get("teacher") or [])
    # A store names the teacher that scored it, which may have several.
    if settings.get("teacher_losses"):
        teachers = list(dict.fromkeys(store["teacher"] for store in settings["teacher_losses"]))
    method = str(settings["method"])
    return TrainingRun(
        label=label,
        method=METHODS.get(method, method),
        teacher=" + ".join(map(teacher_name, teachers)),
        seed=(settings.get("seed"), settings.get("data_seed")),
        options={name: value for name, value in settings.items() if name not in _SEED_SETTINGS},
        state=state,
        eval_loss=evaluation.get("eval_loss"),
        eval_tokens=evaluation.get("eval_tokens"),
        eval_segments=evaluation.get("eval_segments"),
    )


def _read_state(directory: Path, settings: JsonObject) -> JsonObject:
    """Return a run's log and cost: those of its model, or its log where that has come further."""
    path, log_path = directory / STATE_FILE, directory / LOG_FILE
    state = read_json(path) if path.is_file() else {}
    # In Python, a run may end without a model, and it may go on after it had one.
    lines = log_path.read_text(encoding="utf-8").splitlines() if log_path.is_file() else []
    log = [json.loads(line) for line in lines]
    if not log or log[-1]["step"] <= state.get("global_step", -1):
        return state
    last = log[-1]
    state = {"log_history": log, "global_step": last["step"], "total_flos": None}
    for entry in log:
        state["total_flos"] = entry.get("total_flos", state["total_flos"])
    # As in Trainer, a number of steps overrides that of epochs.
    goal, reached = settings.get("max_steps", -1), last["step"]
    if goal <= 0:
        goal, reached = settings.get("num_train_epochs", math.inf), last.get("epoch", 0)
    if reached >= goal:
        state["max_steps"] = last["step"]
    return state


def agree(first: TrainingRun, other: TrainingRun, option: str) -> bool:
    """Test whether two runs have the same value of an option, or one named after each seed.

    Digests agree, too, if they cannot tell whether the documents are the same. `record.differences`
    compares one directory with its own past, so it knows neither seeds nor such digests.
    """
    value, other_value = first.options.get(option), other.options.get(option)
    # Weights & Biases returns 1.0 as 1, and these are equal.
    if value == other_value:
        return True
    if option == DIGEST:
        # The seed chooses the documents that are held out, and may draw those that have no name.
        by_seed = first.options.get("eval_fraction") or not first.options.get("dataset")
        read_alike = all(first.options.get(name) == other.options.get(name) for name in _READING)
        is_unknown = value is None or other_value is None
        return is_unknown or not read_alike or bool(by_seed and first.seed != other.seed)
    # All seeds may share a directory of one seed, so only one of the values is renamed.
    renamed = _with_seed_of(other, value, first)
    return renamed == other_value or value == _with_seed_of(first, other_value, other)


def _with_seed_of(other: TrainingRun, value: object, run: TrainingRun) -> object:
    """Replace a run's seed in names of directories and files by that of another run."""
    name = rf"(seed[-_=]?){run.seed[0]}(?!\d)"
    return json.loads(re.sub(name, rf"\g<1>{other.seed[0]}", json.dumps(value)))


def differing(runs: Sequence[TrainingRun]) -> list[str]:
    """Name the options in which runs differ."""
    # A dictionary keeps the order of the options, with each once.
    names: dict[str, None] = {}
    for first, other in combinations(runs, 2):
        for name in first.options | other.options:
            if not agree(first, other, name):
                names[name] = None
    return list(names)


def group_by_setting(runs: Sequence[TrainingRun]) -> dict[str, list[TrainingRun]]:
    """Group runs that differ only in their seed, under labels that distinguish settings.

    A run that was repeated with the same seed is not another seed of its setting.
    """
    settings: list[list[TrainingRun]] = []
    for run in runs:
        for setting in settings:
            is_new = run.seed not in [member.seed for member in setting]
            if is_new and not differing(setting + [run]):
                setting.append(run)
                break
        else:
            settings.append([run])
    # A label is method and teacher. If several settings have the same, it also has the options in
    # which they differ. Repeated runs differ in no option, and paths may have one ending.
    grouped: dict[str, list[TrainingRun]] = {}
    for setting in settings:
        first = setting[0]
        namesakes = [runs[0] for runs in settings if runs[0].name == first.name]
        label = first.name
        for option in differing(namesakes):
            label += f", {option} {setting_text(first.options.get(option))}"
        if label in grouped:
            label += f", {first.label}"
        grouped[label] = setting
    return grouped


def setting_text(value: object) -> str:
    """Format a setting without a machine's paths."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(entry)}" for name, entry in value.items())
    return "-" if value is None else public_name(str(value))
