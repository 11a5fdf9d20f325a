"""What the paper's figures are drawn from: numbers of runs, evaluations and audits, and views."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vocagnolm.analysis.runs import (
    EVALUATION_DIR,
    RESULTS_FILE,
    ReportedRow,
    Run,
    heading,
    in_order,
    read_reported,
    read_runs,
)
from vocagnolm.host.files import read_json, write_json

if TYPE_CHECKING:
    from vocagnolm.views.view import GuidanceView

EVAL_LOSS = "eval_loss"  # the metric of runs without an evaluation
SETTINGS_FILE, STATE_FILE, AUDIT_FILE = "run.json", "trainer_state.json", "audit.json"
GUIDANCE_FILE, GUIDANCE_DIR = "guidance.json", "guidance"
PAPER_FILE = Path(__file__).parents[1] / "assets" / "paper_guidance.json"
METHODS = {
    "vocagnolm": "VocAgnoLM",
    "uld": "ULD",
    "kld": "KLD",
    "cpt": "CPT",
    "rho1": "Rho-1",
    "chunk": "chunks",
    "random": "random tokens",
}


@dataclass(frozen=True)
class Measured:
    """One number of one run.

    Attributes:
        value: percent, or nats per token.
        interval: of 95 %; None where none is known.
        marked: as in `Accuracy`.
    """

    value: float
    interval: tuple[float, float] | None = None
    marked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """A run of train.py.

    Attributes:
        path: its directory.
        settings: `run.json`.
        evaluation: by evaluate_math.py; None if there is none.
        eval_loss: held-out loss after the last step, nats per token; None if there is none.
    """

    path: Path
    settings: Mapping[str, Any]
    evaluation: Run | None
    eval_loss: float | None

    @property
    def method(self) -> str:
        """One of `METHODS`."""
        return str(self.settings["method"])

    @property
    def teacher(self) -> str | None:
        """Who guided it, by the paper's name if it has one; several are joined."""
        stores = self.settings.get("teacher_losses")
        found = [store["teacher"] for store in stores] if stores else self.settings.get("teacher")
        names = [found] if isinstance(found, str) else found or []
        return " + ".join(map(teacher_name, names)) or None


@dataclass(frozen=True)
class Audited:
    """One teacher of an audit: shares in [0, 1].

    Attributes:
        vocabulary: share of the teacher's vocabulary that is in the student's too, "raw" (the
            paper's: strings as they are in the vocabulary) and "bytes" (what they stand for).
        chunks: IoU and IoS by number of chunks.
        token_level: IoU and IoS.
    """

    teacher: str
    dataset: str
    vocabulary: Mapping[str, float]
    chunks: Mapping[int, tuple[float, float]]
    token_level: tuple[float, float]


@dataclass(frozen=True)
class Sources:
    """All that was given to draw from.

    Attributes:
        trained: runs of train.py.
        evaluated: evaluations of other models, a teacher's for example.
        audited: teachers of audits.
        guidance: files with views of a text, by what holds them.
    """

    trained: Sequence[Trained]
    evaluated: Sequence[Run]
    audited: Sequence[Audited]
    guidance: Mapping[str, Path]


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read what is in some directories, each of which says by its files what it is.

    Raises:
        ValueError: a directory holds nothing to draw, is given twice, or is damaged.
    """
    trained: list[Trained] = []
    evaluated: list[Run] = []
    audited: list[Audited] = []
    guidance: dict[str, Path] = {}
    seen: set[Path] = set()
    for path in paths:
        place = _place(path)
        if place.resolve() in seen:
            raise ValueError(f"expected different runs, found {path} twice: give it once")
        seen.add(place.resolve())
        views = _views_file(place)
        if views:
            guidance[str(path)] = views
        if (place / SETTINGS_FILE).is_file():
            trained.append(_trained(place))
        elif (place / AUDIT_FILE).is_file():
            audited += _audited(place / AUDIT_FILE)
        elif _is_evaluated(place):
            evaluated += read_runs([place])
        elif not views:
            raise ValueError(
                f"expected {SETTINGS_FILE}, {RESULTS_FILE}, {AUDIT_FILE} or {GUIDANCE_FILE} in "
                f"{path}, found none: give a directory of train.py, evaluate_math.py, "
                "vocagnolm audit or vocagnolm inspect"
            )
    return Sources(trained, evaluated, audited, guidance)


def _place(path: Path) -> Path:
    """The run that an evaluation is in, if it is in one."""
    in_run = path.name == EVALUATION_DIR and (path.parent / SETTINGS_FILE).is_file()
    return path.parent if in_run else path


def _is_evaluated(place: Path) -> bool:
    return any((x / RESULTS_FILE).is_file() for x in (place, place / EVALUATION_DIR))


def _views_file(place: Path) -> Path | None:
    """The views that an inspection left, or the last ones of a run."""
    steps = sorted((place / GUIDANCE_DIR).glob("step-*.json"))
    files = [path for path in (place / GUIDANCE_FILE, *reversed(steps)) if path.is_file()]
    return files[0] if files else None


def _trained(place: Path) -> Trained:
    settings = read_json(place / SETTINGS_FILE)
    if settings.get("method") not in METHODS:
        raise ValueError(
            f"{place / SETTINGS_FILE}: expected a method of train.py, found "
            f"{settings.get('method')!r}: give a run of this version"
        )
    evaluation = read_runs([place])[0] if _is_evaluated(place) else None
    return Trained(place, settings, evaluation, _eval_loss(place / STATE_FILE))


def _eval_loss(path: Path) -> float | None:
    """The held-out loss after the last step."""
    if not path.is_file():
        return None
    state = read_json(path)
    try:
        last = [entry for entry in state["log_history"] if entry["step"] == state["max_steps"]]
        losses = [float(entry[EVAL_LOSS]) for entry in last if EVAL_LOSS in entry]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected the log of train.py, found one that cannot be read ({error}): "
            "train again"
        ) from error
    if losses and not math.isfinite(losses[-1]):
        raise ValueError(f"{path}: expected a finite {EVAL_LOSS}, found {losses[-1]}: leave it out")
    return losses[-1] if losses else None


def _audited(path: Path) -> list[Audited]:
    audit = read_json(path)
    try:
        return [
            Audited(
                teacher=teacher_name(one["teacher"]),
                dataset=Path(audit["dataset"]).name,
                vocabulary={
                    kind: float(one["vocabulary_overlap"][kind]["teacher"])
                    for kind in ("raw", "bytes")
                },
                chunks={int(x["chunks"]): _iou_ios(x) for x in one["chunks"]},
                token_level=_iou_ios(one["token_level"]),
            )
            for one in audit["teachers"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path}: expected what vocagnolm audit writes, found none or an unreadable {error}: "
            "audit again"
        ) from error


def _iou_ios(values: Mapping[str, Any]) -> tuple[float, float]:
    return float(values["iou"]), float(values["ios"])


def paper_guidance() -> dict[str, Any]:
    """What the paper reports beside Tables 1 and 4: its models' names, and Table 2."""
    return read_json(PAPER_FILE)


def teacher_name(reference: str) -> str:
    """The paper's name of a model, or else the last part of its own.

    >>> teacher_name("Qwen/Qwen2.5-Math-7B-Instruct"), teacher_name("runs/TinyLlama-CPT")
    ('Qwen2.5-Math-Instruct', 'TinyLlama-CPT')
    """
    own = Path(reference).name
    for name, others in paper_guidance()["models"].items():
        if own.casefold() in (name.casefold(), *map(str.casefold, others)):
            return str(name)
    return own


def measure(run: Trained | Run, metric: str) -> Measured:
    """A number of a run: its held-out loss, or a column of its evaluation.

    Raises:
        ValueError: it does not have it; the message says how to get it.
    """
    evaluation = run.evaluation if isinstance(run, Trained) else run
    path = run.path if isinstance(run, Trained) else run.directory
    if metric == EVAL_LOSS:
        if isinstance(run, Trained) and run.eval_loss is not None:
            return Measured(run.eval_loss)
        raise ValueError(
            f"expected {EVAL_LOSS} after the last step in {path / STATE_FILE}, found none: finish "
            "its training with --eval_fraction or --eval_dataset"
        )
    if evaluation is None:
        raise ValueError(
            f"expected an evaluation of {path}, found none: run python evaluate_math.py --model "
            f"{path}, or draw its held-out loss with --metric {EVAL_LOSS}"
        )
    if metric not in evaluation.accuracies:
        raise ValueError(
            f"expected {metric!r} in the evaluation {evaluation.directory}, found "
            f"{', '.join(map(repr, evaluation.accuracies))}: name one of them with --metric, or "
            "evaluate the rest of the benchmarks"
        )
    accuracy = evaluation.accuracies[metric]
    return Measured(accuracy.exact, accuracy.interval, accuracy.marked)


def measured_models(sources: Sources) -> dict[str, Trained | Run]:
    """Who may be a teacher: every run and evaluation by the name a teacher would have."""
    runs: dict[str, Trained | Run] = {teacher_name(str(run.path)): run for run in sources.trained}
    evaluations = {
        teacher_name(run.model.rsplit(", revision ", 1)[0]): run for run in sources.evaluated
    }
    return runs | evaluations


def reported_rows(names: Sequence[str]) -> list[ReportedRow]:
    """Rows of the paper's Tables 1 and 4.

    Raises:
        ValueError: there is no row of that name.
    """
    return read_reported(names)[1]


def reported_value(row: ReportedRow, metric: str) -> float:
    """What the paper reports.

    Raises:
        ValueError: the row has no such column.
    """
    if metric not in row.values:
        raise ValueError(
            f"expected {metric!r} in the reported row {row.name!r} of {row.table}, found "
            f"{', '.join(map(repr, row.values))}: name one of them with --metric"
        )
    return row.values[metric]


def evaluated_columns(runs: Iterable[Trained | Run]) -> list[str]:
    """The columns that at least one run was evaluated on, in Table 1's order."""
    evaluations = [run.evaluation if isinstance(run, Trained) else run for run in runs]
    return in_order(column for one in evaluations if one for column in one.accuracies)


def column_label(metric: str) -> str:
    """What stands for a metric where its unit is said elsewhere."""
    return "held-out loss" if metric == EVAL_LOSS else heading(metric)


def metric_label(metric: str) -> str:
    """A metric with its unit, for an axis."""
    if metric == EVAL_LOSS:
        return "held-out loss (nats per token)"
    return f"accuracy, {heading(metric)} (%)"


def save(content: Mapping[str, Any], path: Path) -> None:
    """Write what a figure was drawn from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def guidance_views(path: Path) -> GuidanceView:
    """The views that `vocagnolm inspect` or a training run left.

    Raises:
        ValueError: the file is damaged.
    """
    from vocagnolm.views.view import read_views

    return read_views(path)
