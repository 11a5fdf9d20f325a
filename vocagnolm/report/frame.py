"""One tidy frame of all that was measured, from which comparison and figures are read.

A row is one number: of a run of train.py (`source` "trained"), of another evaluated model
("evaluated") or of a teacher in an audit ("audit"). A run without a number has a row without one.

    run     source   model  method  teacher  setting  seed  options  column  value  low   high
    runs/a  trained  a      ULD     Mistral  {...}    [0]   {...}    gsm8k    21.0  19.0  23.0

Runs that differ in nothing but their seed are one setting, hence one mark of a figure.
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vocagnolm.host.cards import public_name
from vocagnolm.host.options import raise_first, wrong_values
from vocagnolm.host.settings import RUN_FILE
from vocagnolm.io import JsonObject, read_json
from vocagnolm.report.panels import Mark
from vocagnolm.report.paper import teacher_name
from vocagnolm.report.runs import (
    AUDIT_FILE,
    EVAL_LOSS,
    GUIDANCE_FILE,
    RESULTS_FILE,
    TEXTS,
    Row,
    Run,
    find_evaluation,
    find_views,
    read_audit,
    read_eval_loss,
    read_runs,
    readable,
    reject,
    run_directory,
)

METHOD_LABELS: dict[str, str] = TEXTS["methods"]
_FIELDS = ["run", "source", "model", "method", "teacher", "setting", "seed", "options"]
_FIELDS += ["dataset", "chunks", "column", "value", "rounded", "low", "high", "marked"]
_OF_A_SEED = {"seed", "data_seed", "corpus_digest", "blocks", "teacher_losses_sha256"}
_SEED_IN_A_PATH = re.compile(r"seed[-_=]?\d+")


def read_frame(paths: Sequence[Path]) -> pd.DataFrame:
    """Read directories, each of which tells by its files what it holds.

    Raises:
        ValueError: a directory holds nothing to draw, is given twice, or is damaged.
    """
    places: dict[Path, Path] = {}
    for path in paths:
        place = run_directory(path)
        if place.resolve() in places:
            reject("different runs", f"{path} twice", "give it once")
        places[place.resolve()] = place
    # All at once, so that each has a label of its own.
    runs = read_runs([*filter(find_evaluation, places.values())])
    evaluations: dict[Path | None, Run] = {run.directory: run for run in runs}
    rows: list[Row] = []
    for place in places.values():
        run = evaluations.get(find_evaluation(place))
        found = [row for row in run.scores if not row["second"]] if run else []
        # A run of train.py may have an evaluation, and views of its own.
        if (place / RUN_FILE).is_file():
            about, found = _trained(place), found + read_eval_loss(place)
        elif (place / AUDIT_FILE).is_file():
            about, found = {"source": "audit"}, read_audit(place / AUDIT_FILE)
        elif run:
            about = _evaluated(run)
        elif find_views(place):
            continue
        else:
            files = f"{RUN_FILE}, {RESULTS_FILE}, {AUDIT_FILE} or {GUIDANCE_FILE}"
            makers = "train.py, evaluate_math.py, vocagnolm audit or vocagnolm inspect"
            reject(f"{files} in {place}", "none", f"give a directory of {makers}")
        # A run without any number keeps a row, so that a figure can say what it lacks.
        rows += [{"run": str(place)} | row | about for row in found or [{"marked": ()}]]
    return pd.DataFrame(rows, columns=_FIELDS)


def _evaluated(run: Run) -> Row:
    model, place = teacher_name(run.model.rsplit(", revision ", 1)[0]), str(run.directory)
    about: Row = {"source": "evaluated", "model": model, "method": run.label, "teacher": ""}
    return about | {"run": place, "setting": place, "seed": "", "options": {}}


def _trained(place: Path) -> Row:
    settings = read_json(place / RUN_FILE)
    with readable(place / RUN_FILE, "a run and a method of this train.py"):
        raise_first(wrong_values(settings, {"global_batch_tokens": int}, "--"))
        method, teacher = METHOD_LABELS[settings["method"]], _teachers(settings)
    # The identity of a setting: all options but those of a seed, and paths without their "seedN".
    kept = json.dumps({name: x for name, x in settings.items() if name not in _OF_A_SEED})
    options = json.loads(_SEED_IN_A_PATH.sub("seed", kept), parse_float=_number)
    in_paths = _SEED_IN_A_PATH.findall(json.dumps(settings))
    return {
        "source": "trained",
        "model": teacher_name(str(place)),
        "method": method,
        "teacher": teacher,
        "setting": json.dumps(options, sort_keys=True),
        "seed": json.dumps([settings.get("seed"), settings.get("data_seed"), in_paths]),
        "options": options,
        "chunks": settings.get("chunks") if settings["method"] == "chunk" else 0,
    }


def _number(text: str) -> float:
    # Weights & Biases gives 1.0 back as 1.
    value = float(text)
    return int(value) if value.is_integer() else value


def _teachers(settings: JsonObject) -> str:
    """Name who guided a run, joined if there are several; "" for nobody."""
    # A store names the teacher that scored it.
    stores = settings.get("teacher_losses")
    found = [store["teacher"] for store in stores] if stores else settings.get("teacher")
    names = [found] if isinstance(found, str) else found or []
    return " + ".join(map(teacher_name, names))


def option_of(run: Any, name: str) -> Any:
    """Return an option of a run of train.py, a row of the frame; earlier versions had fewer."""
    with readable(Path(run.run) / RUN_FILE, "a run of this train.py"):
        return run.options[name]


def trained(frame: pd.DataFrame, method: str = "") -> pd.DataFrame:
    """Select the runs of train.py, or those of one method."""
    runs = frame[frame.source == "trained"]
    return runs[runs.method == METHOD_LABELS[method]] if method else runs


def average_setting(
    setting: pd.DataFrame, metric: str, x: float | str | None = None, text: str = ""
) -> Mark:
    """Average a metric over the runs of a setting.

    Raises:
        ValueError: one does not have it; the message says how to get it.
    """
    found = setting[setting.column == metric]
    lacking = setting[~setting.run.isin(found.run)]
    if len(lacking):
        run = lacking.run.iloc[0]
        have = ", ".join(map(repr, lacking.column[lacking.run == run].dropna())) or "none"
        advice = f"run python evaluate_math.py --model {run}, or give another --metric, {EVAL_LOSS}"
        if metric == EVAL_LOSS:
            advice = "finish its training with --eval_fraction or --eval_dataset"
        reject(f"{metric!r} of {run}", have, advice)
    values = found.value.tolist()
    mean, low, high = statistics.fmean(values), found.low.iloc[0], found.high.iloc[0]
    if len(values) > 1:
        deviation = statistics.stdev(values)
        low, high = mean - deviation, mean + deviation
    return Mark(
        x,
        mean,
        bar=None if pd.isna(low) else (low, high),
        text=text,
        marked=tuple(sorted(set().union(*found.marked))),
        seeds=len(values),
        runs=tuple(found.run),
    )


def settings(trained: pd.DataFrame) -> list[pd.DataFrame]:
    """Split runs by setting.

    Raises:
        ValueError: two runs of one setting have the same seed.
    """
    runs = trained.drop_duplicates("run")
    for _, same in runs.groupby(["setting", "seed"], sort=False):
        if len(same) > 1:
            found = f"{' and '.join(same.run[:2])} with the same"
            reject("the runs of one setting to have seeds of their own", found, "leave one out")
    return [group for _, group in trained.groupby("setting", sort=False)]


def marks(trained: pd.DataFrame, metric: str, x: Callable[[pd.Series], float]) -> list[Mark]:
    """Average every setting, in the order of x, which reads a row.

    Raises:
        ValueError: two settings stand at the same x, or a run does not have the metric.
    """
    at: dict[float, pd.DataFrame] = {}
    for setting in settings(trained):
        place = x(setting.iloc[0])
        other = at.setdefault(place, setting)
        if other is not setting:
            found = f"{other.run.iloc[0]} and {setting.run.iloc[0]}, which differ in "
            found += ", ".join(differing([other, setting]))
            reject(f"one setting of {label_of(setting)} for each mark", found, "leave one out")
    return [average_setting(at[place], metric, place) for place in sorted(at)]


def label_of(setting: pd.DataFrame) -> str:
    """Return the method and the teacher."""
    first = setting.iloc[0]
    return ", ".join(filter(None, (first.method, first.teacher)))


def labels_of(all_settings: Sequence[pd.DataFrame]) -> list[str]:
    """Tell settings apart: by method and teacher, and where these are equal, by their options."""
    labels = []
    for setting in all_settings:
        alike = [other for other in all_settings if label_of(other) == label_of(setting)]
        options = setting.options.iloc[0]
        apart = [f"{name} {setting_text(options.get(name))}" for name in differing(alike)]
        labels.append(", ".join([label_of(setting), *apart]))
    # A run that was repeated is told from the other by its name, or else by its path.
    runs = [setting.run.iloc[0] for setting in all_settings]
    names = [public_name(run) for run in runs]
    return [
        f"{label}, {name if names.count(name) == 1 else run}" if labels.count(label) > 1 else label
        for label, name, run in zip(labels, names, runs, strict=True)
    ]


def differing(several: Sequence[pd.DataFrame]) -> list[str]:
    """List the options in which some settings are not all the same, in the order of `run.json`."""
    options = [setting.options.iloc[0] for setting in several]
    names = dict.fromkeys(name for one in options for name in one)
    return [name for name in names if any(one.get(name) != options[0].get(name) for one in options)]


def setting_text(value: object) -> str:
    """Write a setting without the paths of a machine."""
    if isinstance(value, list):
        return ", ".join(map(setting_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {setting_text(one)}" for name, one in value.items())
    return "-" if value is None else public_name(str(value))
