"""Reads runs of vocagnolm train, and groups those that differ only in their seed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from vocagnolm.fields import options_of
from vocagnolm.report.paper import teacher_name
from vocagnolm.shell.hub import public_name
from vocagnolm.shell.io import RUN_FILE, JsonObject, read_json
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
# draw the corpus by the seed, so its digest and size are among them. Each seed may have its own
# models, whose paths tell them apart. `read_other_documents` compares the digest where it can.
# Version 0.1.0 recorded the weights instead of `teacher_files`.
_SEED_SETTINGS = {
    "seed",
    "data_seed",
    "corpus_digest",
    "blocks",
    "teacher_losses_sha256",
    "teacher_files",
    "teacher_weights_sha256",
    "student_weights",
    "evaluation",
}
_DIGEST = "corpus_digest"
# The digest of a corpus depends on its documents and on how they are read: on the options of
# models, data and packing, and on these.
_READING = {"teacher_reduction", "uld_pairing", "chat_templates_sha256"}


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


def read_training(label: str, directory: Path) -> TrainingRun:
    """Read the settings and the log of a run."""
    settings = read_json(directory / RUN_FILE)
    # A run in Python that was never saved has no state.
    state_path = directory / STATE_FILE
    state = read_json(state_path) if state_path.is_file() else {}
    # The evaluation after the last step. A resumed run may have logged it twice.
    evaluation: JsonObject = {}
    for entry in state.get("log_history", []):
        if entry["step"] == state["max_steps"] and "eval_loss" in entry:
            evaluation = entry
    teachers = settings.get("teacher") or []
    if isinstance(teachers, str):
        teachers = [teachers]
    # A store names the teacher that scored it.
    if settings.get("teacher_losses"):
        teachers = [store["teacher"] for store in settings["teacher_losses"]]
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
    names = set(_READING)
    for declared in options_of(ModelOptions, LoadOptions, DataOptions, PackOptions):
        names.add(declared.name)
    # Some methods align the teacher's tokens in their own way.
    if first.teacher:
        names.add("method")
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
    repeated = set()
    for run, other in combinations(runs, 2):
        if run.seed == other.seed and _have_one_setting(run, other):
            repeated |= {run.label, other.label}
    settings: list[list[TrainingRun]] = []
    for run in runs:
        for setting in settings:
            can_join = repeated.isdisjoint((run.label, setting[0].label))
            if can_join and all(_have_one_setting(run, member) for member in setting):
                setting.append(run)
                break
        else:
            settings.append([run])
    # A label is method and teacher. If several settings have the same, it also has the options in
    # which they differ.
    labels = []
    for setting in settings:
        first = setting[0]
        namesakes = [runs[0] for runs in settings if runs[0].name == first.name]
        label = first.name
        for name, texts in differing(namesakes).items():
            label += f", {name} {texts[namesakes.index(first)]}"
        labels.append(label)
    grouped = {}
    for label, setting in zip(labels, settings, strict=True):
        # Repeated runs differ in no option, and paths may have one ending, so their own labels
        # distinguish them.
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
