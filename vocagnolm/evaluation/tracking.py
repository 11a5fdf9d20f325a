"""An evaluation in Weights & Biases, in the run that trained the model: docs/wandb.md."""

import os
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path

from vocagnolm.evaluation.records import Record, to_line
from vocagnolm.evaluation.report import RESULTS_FILE
from vocagnolm.io import write_json, write_text
from vocagnolm.run.wandb import PLACE_FILE, begin_run, check_trackers, read_place

# Of the run's files, as beside a model.
_FOLDER = "evaluation"
_SHOWN = ("idx", "raw_output", "prediction", "gold", "decided_by", "finish_reason", "math_verify")
# All that a paired test needs of an item.
_VERDICT = ("benchmark", "idx", "correct", "gold", "prompt_sha256")


class Tracker:
    """The run that takes an evaluation: the one that trained the model, or one of its own.

    A checkpoint's has the checkpoint's name before all else: `eval/checkpoint-500/gsm8k/...`.
    """

    def __init__(self, model: str, *, chat: bool = False):
        check_trackers(["wandb"])
        path = Path(model)
        is_checkpoint = not (path / PLACE_FILE).is_file() and path.is_dir()
        self._place = read_place(path.resolve().parent if is_checkpoint else path)
        part = path.resolve().name if is_checkpoint and self._place else ""
        # Beside a few-shot evaluation, not in place of it.
        self._part = "-".join(filter(None, (part, "chat" if chat else "")))

    def report(self, results: Record, records: Mapping[str, Iterable[Record]]) -> None:
        """Put the columns into the summary, wrong answers into tables, and verdicts into files."""
        wandb, model = import_module("wandb"), results["model"]["name"]
        project = os.environ.get("WANDB_PROJECT", "vocagnolm")
        place = self._place or {"project": project, "name": f"evaluation of {model}"}
        key = "_".join(filter(None, (_FOLDER, self._part)))
        about = {name: results.get(name) for name in ("model", "settings", "environment")}
        with begin_run({**place, "config": {**place.get("config", {}), key: about}}) as run:
            run.summary.update(dict(summary(results, self._part)))
            directory = Path(run.dir, _FOLDER, self._part)
            directory.mkdir(parents=True, exist_ok=True)
            for name, graded in records.items():
                items = list(graded)
                wrong = [item for item in items if not item["correct"]]
                rows = [[_cell(item[field]) for field in _SHOWN] for item in wrong]
                column = _place(name, results["benchmarks"][name], self._part)
                run.log({f"{column}/wrong_answers": wandb.Table(list(_SHOWN), rows)})
                verdicts = ({key: item[key] for key in _VERDICT if key in item} for item in items)
                write_text(directory / f"{name}.jsonl", "".join(map(to_line, verdicts)))
            write_json(directory / RESULTS_FILE, results)
            run.save(f"{directory}/*", base_path=run.dir, policy="end")


def summary(results: Record, part: str = "") -> Iterator[tuple[str, object]]:
    """Name the values of the summary; the name of a marked one holds its marks."""
    for name, column in results["benchmarks"].items():
        place, (low, high) = _place(name, column, part), column["interval"]
        yield f"{place}/accuracy_percent", column["rounded"]
        yield f"{place}/interval_low_percent", low
        yield f"{place}/interval_high_percent", high
        yield f"{place}/items", column["n"]
        yield f"{place}/unanswered_fraction", column["unanswered"]
        if column["math_verify"]:
            yield f"{place}/math_verify_accuracy_percent", column["math_verify"]["rounded"]
    for name, value in results["averages"].items():
        # A slash would begin a part of the name.
        place = _place(name.replace("w/o", "without"), value, part)
        yield f"{place}/accuracy_percent", value["rounded"]
    place = "/".join(filter(None, ("eval", part)))
    yield f"{place}/marks", "; ".join(results["marks"])
    yield f"{place}/grader", results["grader"]


def _place(name: str, column: Record, part: str) -> str:
    return "/".join(filter(None, ("eval", part, name, *column["marked"])))


def _cell(value: object) -> object:
    # Invalid Unicode is shown escaped.
    return str(value).encode(errors="backslashreplace").decode() if type(value) is str else value
