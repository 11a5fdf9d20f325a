"""Reads runs and evaluations, and compares each with the first of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vocagnolm.report.evaluations import RESULTS_FILE, Evaluation, Score, read_evaluation
from vocagnolm.report.paper import Reported, read_reported
from vocagnolm.report.statistics import Pairing, pair
from vocagnolm.report.trainings import TrainingRun, group_by_setting, read_training
from vocagnolm.shell.io import RUN_FILE, JsonObject, read_json

# Folders in a model's directory that have its evaluations. Their ends distinguish its labels.
_FOLDERS = ("", "evaluation", "evaluation-chat", "evaluation-sampled", "evaluation-chat-sampled")


@dataclass(frozen=True)
class Comparison:
    """Some runs that are compared."""

    # The first evaluation is the baseline.
    evaluations: Sequence[Evaluation]
    # Runs of vocagnolm train by setting.
    settings: Mapping[str, Sequence[TrainingRun]]
    reported: Sequence[Reported]
    # Every evaluation with the first of its protocol: few-shot or chat, greedy or sampled in the
    # same way.
    pairings: Sequence[Pairing]


def compare(paths: Sequence[Path], reported: Sequence[str] = ()) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper.

    A path is the directory of a model, with or without evaluations in it, or of an evaluation.
    """
    if not paths:
        raise ValueError("no RUN to compare: give directories of vocagnolm train or evaluate")
    reported_cells = read_reported(reported)
    trained: list[TrainingRun] = []
    evaluations: list[Evaluation] = []
    # A path that is given twice counts once.
    paths = list(dict.fromkeys(paths))
    names = [path.absolute().name for path in paths]
    for path, name in zip(paths, names, strict=True):
        # If two directories have the same name, their paths distinguish them.
        label = name if names.count(name) == 1 else str(path)
        read_before = len(trained) + len(evaluations)
        if _has_key(path / RUN_FILE, "method"):
            trained.append(read_training(label, path))
        for folder in _FOLDERS:
            directory, suffix = path / folder, folder.removeprefix("evaluation")
            if _has_key(directory / RESULTS_FILE, "averages"):
                # Another directory may have the longer name.
                is_free = not suffix or label + suffix not in names
                its_label = label + suffix if is_free else str(directory)
                evaluations.append(read_evaluation(its_label, directory))
        if len(trained) + len(evaluations) == read_before:
            raise ValueError(
                f"{path} has no {RUN_FILE} of a run and no {RESULTS_FILE} of an evaluation (also "
                "not in evaluation/): run vocagnolm train or evaluate first"
            )
    # A model answers other prompts differently, and so it does when its outputs are sampled.
    firsts: dict[str, Evaluation] = {}
    pairings: list[Pairing] = []
    for evaluation in evaluations:
        first = firsts.setdefault(evaluation.protocol, evaluation)
        if first is not evaluation:
            pairings += pair(first, evaluation)
    return Comparison(evaluations, group_by_setting(trained), reported_cells, pairings)


def _has_key(path: Path, key: str) -> bool:
    """Test for a JSON file with a key that ours has, because others may have its name."""
    return path.is_file() and key in read_json(path)


def to_json(comparison: Comparison) -> JsonObject:
    """Return the content of `comparison.json`, from which benchmarks/figures.py draws."""
    evaluated = []
    scores: list[Score] = []
    for evaluation in comparison.evaluations:
        names = ("label", "model", "prompts", "settings", "notes")
        evaluated.append({name: getattr(evaluation, name) for name in names})
        scores += evaluation.scores
    trained = []
    for setting, runs in comparison.settings.items():
        for run in runs:
            names = ("method", "teacher", "seed", "options", "eval_loss")
            row = {name: getattr(run, name) for name in names}
            trained.append({"run": run.label, "setting": setting} | row)
    return {
        "runs": evaluated,
        "trained": trained,
        "scores": scores,
        "reported": comparison.reported,
        "pairings": [asdict(pairing) for pairing in comparison.pairings],
    }
