"""README.md of a trained student, with settings and losses in full."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers import TrainerState

from vocagnolm.cli import one_or_all
from vocagnolm.host.cards import CITATION, TAGS, hub_name, public, public_name
from vocagnolm.host.options import listed
from vocagnolm.host.trackers import TRACKER_FILE
from vocagnolm.io import ASSETS, json_or_empty, markdown_table, versions

_PACKAGES = "vocagnolm torch transformers accelerate datasets tokenizers"
# Of the log, with their headings.
_LOSSES = {
    "student_loss_nats": "student",
    "selected_loss_nats": "student, selected",
    "teacher_loss_nats": "teacher",
    "eval_loss": "evaluation",
}
_MOST_ROWS = 10


def model_card(
    directory: Path, settings: Mapping[str, Any], state: TrainerState, repository: str | None = None
) -> str:
    """Describe a trained student, for `README.md` beside its weights."""
    corpora = listed(settings["dataset"])
    on_hub = list(filter(None, map(hub_name, corpora)))
    stores, teachers = settings["teacher_losses"] or [], listed(settings["teacher"] or [])
    data = ModelCardData(
        library_name="peft" if settings["use_peft"] else "transformers",
        pipeline_tag="text-generation",
        license=_licence(settings["student"]),
        tags=list(dict.fromkeys([*TAGS, "continual-pretraining", settings["method"]])),
        base_model=hub_name(settings["student"]),
        datasets=one_or_all(on_hub) if on_hub else None,
    )
    name = repository.split("/")[-1] if repository else directory.name
    software = versions(f"python {_PACKAGES}")
    card = ModelCard.from_template(
        data,
        template_path=str(ASSETS / "model_card.md"),
        name=name,
        student=public_name(settings["student"]),
        method=settings["method"],
        dataset=_names(corpora),
        is_stored=bool(stores),
        teachers=_names([store["teacher"] for store in stores] or teachers),
        tracked=json_or_empty(directory / TRACKER_FILE).get("url"),
        losses=_losses(state.log_history, settings["global_batch_tokens"]),
        repository=repository or directory.name,
        settings=json.dumps(public(settings), indent=2),
        software=", ".join(f"{package} {version}" for package, version in software.items()),
        citation=CITATION,
    )
    return str(card)


def _licence(student: str) -> str | None:
    """Look up the student's licence, which its descendants have too, in its own card."""
    place = Path(student) / "README.md" if Path(student).is_dir() else student
    try:
        found: str | None = ModelCard.load(place, ignore_metadata_errors=True).data.license
    # It has no card, or one that is no YAML, or there is no network.
    except (OSError, ValueError, TypeError, yaml.YAMLError):
        return None
    return found


def _losses(log: Sequence[Mapping[str, float]], batch_tokens: int) -> str:
    """Lay out the losses of at most ten steps, the first and the last among them."""
    steps: dict[float, dict[str, float]] = {}
    for entry in log:
        if found := {name: entry[name] for name in _LOSSES if name in entry}:
            steps.setdefault(entry["step"], {}).update(found)
    last = len(steps) - 1
    shown = {round(row * last / (_MOST_ROWS - 1)) for row in range(_MOST_ROWS)}
    columns = [name for name in _LOSSES if any(name in losses for losses in steps.values())]
    rows = [["step", "tokens", *(_LOSSES[name] for name in columns)]]
    for number, (step, losses) in enumerate(steps.items()):
        if number in shown:
            cells = (f"{losses[name]:.4f}" if name in losses else "" for name in columns)
            rows.append([f"{step:,}", f"{step * batch_tokens:,}", *cells])
    return markdown_table(rows)


def _names(places: Sequence[str]) -> str:
    return " and ".join(map(public_name, places))
