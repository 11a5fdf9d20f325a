"""Runs side by side, with the paper's reported rows, and their differences from the first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from vocagnolm.host.settings import RUN_FILE
from vocagnolm.report.frame import read_frame
from vocagnolm.report.paired import Pairing, pair
from vocagnolm.report.paper import read_reported
from vocagnolm.report.runs import (
    Run,
    find_evaluation,
    read_runs,
    reject,
    run_directory,
    with_chats,
)

RESAMPLES = 10_000
SEED = 0
_SCORE = ["run", "column", "second", "value", "rounded", "low", "high", "marked"]


@dataclass(frozen=True)
class Comparison:
    """Some runs compared."""

    # Evaluations, the baseline first.
    runs: Sequence[Run]
    # All their numbers, as rows.
    scores: pd.DataFrame
    # All runs, also those without an evaluation, and what each is called.
    frame: pd.DataFrame
    labels: Mapping[str, str]
    # The paper's numbers: row, table, column, reported.
    reported: pd.DataFrame
    # Rows of `scores` beside rows of `reported`, with the difference in points and whether the
    # reported number is inside our 95 % interval.
    against_reported: pd.DataFrame
    source: str
    # Every other run against the first of its protocol, few-shot or chat.
    pairings: Sequence[Pairing]
    resamples: int
    seed: int

    @property
    def verdicts(self) -> pd.DataFrame:
        """The scores by the first grader."""
        return self.scores[~self.scores.second]


def compare(
    paths: Sequence[Path],
    reported: Sequence[str] = (),
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Comparison:
    """Read runs, pair each evaluation with its protocol's first, and add rows of the paper.

    Raises:
        ValueError: a directory, a file or a name is wrong, or there is nothing to compare.
    """
    if not paths:
        advice = "give directories of evaluate_math.py, or --figure 4 with --reported 'Table 1'"
        reject("a RUN to compare", "none", advice)
    source, theirs = read_reported(reported)
    paths = list(with_chats(paths))
    # Runs of train.py need no evaluation.
    runs = read_runs([x for x in paths if find_evaluation(x) or not (x / RUN_FILE).is_file()])
    frame = read_frame(paths)
    # A repeated run is no seed of a setting: it stands beside the other.
    is_repeated = frame.groupby(["setting", "seed"]).run.transform("nunique") > 1
    frame.loc[is_repeated, "setting"] = frame.run
    # Asked few-shot and in a chat, a model gives other answers to other prompts.
    first = {run.prompts == "chat": run for run in reversed(runs)}
    pairs = ((first[run.prompts == "chat"], run) for run in runs)
    pairings = [pair(one, run, resamples, seed) for one, run in pairs if one is not run]
    rows = [{"run": run.label, **score} for run in runs for score in run.scores]
    scores = pd.DataFrame(rows, columns=_SCORE).astype({"second": bool})
    # Every number of ours beside every reported number of its column.
    verdicts = scores[~scores.second]
    for row, printed in theirs.groupby("row", sort=False):
        for run, ours in verdicts.groupby("run", sort=False):
            if not ours.column.isin(printed.column).any():
                advice = "evaluate the paper's benchmarks or leave it out"
                expected = f"{run} to share a column with the reported {row!r}"
                reject(expected, ", ".join(ours.column), advice)
    against = verdicts.merge(theirs, on="column")
    against = against.assign(
        points=(against.rounded - against.reported).round(1),
        inside=against.reported.between(against.low, against.high),
    )
    labels = _labels(frame, runs)
    return Comparison(
        *(runs, scores, frame, labels, theirs, against, source, pairings, resamples, seed)
    )


def _labels(frame: pd.DataFrame, runs: Sequence[Run]) -> dict[str, str]:
    """Call runs as their evaluations are called, others by their names or else by their paths."""
    evaluated = {run_directory(run.directory).resolve(): run.label for run in runs}
    places = [Path(run) for run in dict.fromkeys(frame.run)]
    names = [evaluated.get(place.resolve(), place.name) for place in places]
    return {
        str(place): name if names.count(name) == 1 else str(place)
        for place, name in zip(places, names, strict=True)
    }
