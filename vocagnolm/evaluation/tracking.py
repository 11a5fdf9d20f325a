"""The columns of an evaluation in Weights & Biases, beside the run that trained the model."""

import importlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from vocagnolm.evaluation.records import Record
from vocagnolm.host.files import JsonObject, json_or_empty
from vocagnolm.host.settings import TRACKER_FILE

_SHOWN = ("idx", "raw_output", "prediction", "gold", "decided_by", "finish_reason", "math_verify")


class Tracker:
    """The run that takes the columns: the one that trained the model, or one of its own.

    Without a key, or with WANDB_MODE=offline, the run is written to disk for `wandb sync`.
    """

    def __init__(self, model: str):
        self._wandb = _import_wandb()
        self._training = _training_run(Path(model) / TRACKER_FILE)

    def report(self, results: Record, records: Mapping[str, Iterable[Record]]) -> None:
        """Put the columns into the summary, and the wrong answers of each benchmark into tables."""
        training, is_own = self._training, not self._training
        is_offline = "WANDB_MODE" not in os.environ and not self._wandb.api.api_key
        try:
            with self._wandb.init(
                project=training.get("project") or os.environ.get("WANDB_PROJECT", "vocagnolm"),
                entity=training.get("entity") or None,
                id=training.get("id"),
                resume=None if is_own else "allow",
                name=f"evaluation of {results['model']['name']}" if is_own else None,
                mode="offline" if is_offline else None,
            ) as run:
                run.summary.update(dict(summary(results)))
                for name, graded in records.items():
                    wrong = [record for record in graded if not record["correct"]]
                    rows = [[_cell(record[field]) for field in _SHOWN] for record in wrong]
                    table = self._wandb.Table(columns=list(_SHOWN), data=rows)
                    run.log({f"{_place(name, results['benchmarks'][name])}/wrong_answers": table})
        except self._wandb.Error as error:
            said = f"the results are written, but wandb says: {error}; the same command tries again"
            raise ValueError(f"--report_to wandb: {said}") from error


def summary(results: Record) -> Iterator[tuple[str, object]]:
    """Name the values of the summary; the name of a marked one holds its marks."""
    for name, column in results["benchmarks"].items():
        place, (low, high) = _place(name, column), column["interval"]
        yield f"{place}/accuracy", column["rounded"]
        yield f"{place}/interval_low", low
        yield f"{place}/interval_high", high
        yield f"{place}/n", column["n"]
        yield f"{place}/unanswered", column["unanswered"]
        if column["math_verify"]:
            yield f"{place}/math_verify_accuracy", column["math_verify"]["rounded"]
    for name, value in results["averages"].items():
        yield _place(name, value), value["rounded"]
    yield "evaluation/marks", "; ".join(results["marks"])
    yield "evaluation/grader", results["grader"]


def _place(name: str, part: Record) -> str:
    return "/".join(["evaluation", name, *part["marked"]])


def _cell(value: object) -> object:
    # Invalid Unicode is shown escaped.
    return str(value).encode(errors="backslashreplace").decode() if type(value) is str else value


def _import_wandb() -> ModuleType:
    try:
        wandb = importlib.import_module("wandb")
        # A directory of that name, which wandb makes for its files, imports too.
        if hasattr(wandb, "init"):
            return wandb
    except ImportError:
        pass
    missing = "--report_to wandb needs the package wandb, which is not installed"
    raise ValueError(f"{missing}: `pip install wandb`, or leave --report_to out")


def _training_run(path: Path) -> JsonObject:
    # Id, project and entity; nothing where no training left them.
    place = json_or_empty(path)
    if path.is_file() and not isinstance(place.get("id"), str):
        raise ValueError(f"{path}: expected the id of a run, found none: delete the file")
    return place
