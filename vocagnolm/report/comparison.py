"""Reads runs and evaluations, and compares each with the first of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vocagnolm.report.evaluations import (
    RESULTS_FILE,
    Evaluation,
    Score,
    is_unfinished,
    read_evaluation,
)
from vocagnolm.report.paper import Reported, read_reported
from vocagnolm.report.statistics import Pairing, pair
from vocagnolm.report.trainings import TrainingRun, group_by_setting, read_training
from vocagnolm.shell.io import RUN_FILE, JsonObject, read_json

# Folders in a model's directory that have its evaluations, and what they add to its label.
_FOLDERS = {
    "evaluation": "",
    "evaluation-chat": "-chat",
    "evaluation-sampled": "-sampled",
    "evaluation-chat-sampled": "-chat-sampled",
}


@dataclass(frozen=True)
class Comparison:
    """Some runs that are compared."""

    # The first evaluation is the baseline.
    evaluations: Sequence[Evaluation]
    # Runs of vocagnolm train, and the same runs by setting.
    trained: Sequence[TrainingRun]
    settings: Mapping[str, Sequence[TrainingRun]]
    reported: Sequence[Reported]
    # Every evaluation with the first of its protocol: few-shot or chat, greedy or sampled in the
    # same way.
    pairings: Sequence[Pairing]
    # Sentences that name the evaluations without results.
    unfinished: Sequence[str]

    def labels(self) -> list[str]:
        """Return the labels of all runs and evaluations, each once."""
        labels = [run.label for run in self.trained]
        labels += [evaluation.label for evaluation in self.evaluations]
        return list(dict.fromkeys(labels))

    def setting_of(self) -> dict[str, str]:
        """Return the setting of each training run, by the run's label."""
        setting_of = {}
        for setting, runs in self.settings.items():
            for run in runs:
                setting_of[run.label] = setting
        return setting_of


def compare(paths: Sequence[Path], reported: Sequence[str] = ()) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper.

    A path is the directory of a model, with or without evaluations in it, or of an evaluation.
    """
    if not paths:
        raise ValueError("no RUN to compare: give directories of vocagnolm train or evaluate")
    reported_cells = read_reported(reported)
    trained: list[TrainingRun] = []
    evaluations: list[Evaluation] = []
    unfinished = []
    # A path that is given twice counts once.
    paths = list(dict.fromkeys(paths))
    names = [path.absolute().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        # If two directories have the same name, their paths distinguish them.
        label = name if names.count(name) == 1 else str(path)
        directories = {path: label}
        for folder, suffix in _FOLDERS.items():
            # Another directory may have the longer name.
            is_free = not suffix or label + suffix not in names
            directories[path / folder] = label + suffix if is_free else str(path / folder)
            if is_unfinished(path / folder):
                unfinished.append(f"{name}: its {folder} is unfinished: evaluate it again.")
        read_before = len(trained) + len(evaluations)
        if _has_key(path / RUN_FILE, "method"):
            trained.append(read_training(label, path))
        for directory, its_label in directories.items():
            if _has_key(directory / RESULTS_FILE, "averages"):
                evaluations.append(read_evaluation(its_label, directory))
        if len(trained) + len(evaluations) == read_before:
            raise ValueError(
                f"{path} has no {RUN_FILE} of a run and no {RESULTS_FILE} of an evaluation (also "
                "not in evaluation/): run vocagnolm train or evaluate first"
            )
    return Comparison(
        evaluations=evaluations,
        trained=trained,
        settings=group_by_setting(trained),
        reported=reported_cells,
        pairings=_pair_with_firsts(evaluations),
        unfinished=unfinished,
    )


def _pair_with_firsts(evaluations: Sequence[Evaluation]) -> list[Pairing]:
    """Pair every evaluation with the first one of its protocol."""
    # A model answers other prompts differently, and so it does when its outputs are sampled.
    firsts: dict[tuple[bool, str], Evaluation] = {}
    pairings: list[Pairing] = []
    for evaluation in evaluations:
        protocol = evaluation.prompts == "chat", evaluation.sampling
        first = firsts.setdefault(protocol, evaluation)
        if first is not evaluation:
            pairings += pair(first, evaluation)
    return pairings


def _has_key(path: Path, key: str) -> bool:
    """Test for a JSON file with a key that ours has, because others may have its name."""
    return path.is_file() and key in read_json(path)


def to_json(comparison: Comparison) -> JsonObject:
    """Return the content of `comparison.json`, from which benchmarks/figures.py draws."""
    evaluated = []
    scores: list[Score] = []
    for evaluation in comparison.evaluations:
        evaluated.append(
            {
                "label": evaluation.label,
                "model": evaluation.model,
                "grader": evaluation.grader,
                "prompts": evaluation.prompts,
                "conditions": evaluation.conditions,
                "notes": evaluation.notes,
            }
        )
        scores += evaluation.scores
    trained = []
    setting_of = comparison.setting_of()
    for run in comparison.trained:
        trained.append(
            {
                "run": run.label,
                "setting": setting_of[run.label],
                "method": run.method,
                "teacher": run.teacher,
                "seed": run.seed,
                "options": run.options,
                "eval_loss": run.eval_loss,
            }
        )
    return {
        "runs": evaluated,
        "trained": trained,
        "scores": scores,
        "reported": comparison.reported,
        "pairings": [asdict(pairing) for pairing in comparison.pairings],
    }
