"""What a run writes about itself: the settings that it, and its checkpoints, go on under."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.host.files import check_writable, json_or_empty, write_json
from vocagnolm.host.manifest import MANIFEST_FILE

SETTINGS_FILE = "run.json"
TRACKER_FILE = "wandb_run.json"


def origin_fault(
    path: str | Path, settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> str | None:
    """What says that a checkpoint is of another run, or of none that is known; None if it fits.

    Args:
        path: of the checkpoint.
        settings: what is known so far of what defines this run; the rest is not compared.
        defaults: of options that a run does not name as it is older than they are.
    """
    before = run_of(path)
    changed = _changes(before, settings, defaults) if before else []
    return f"it is of a run with other settings ({'; '.join(changed)})" if changed else None


def run_of(path: str | Path) -> dict[str, Any]:
    """The settings of the run that has saved a checkpoint; empty if it does not say."""
    found = json_or_empty(Path(path) / MANIFEST_FILE).get("run")
    return found if isinstance(found, dict) else {}


def check_settings(
    output_dir: str | Path,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
) -> None:
    """Refuse to go on with a run under other settings than it was started with.

    Args:
        output_dir: where the run keeps everything.
        settings: what is known so far of what defines the run; the rest is not compared.
        defaults: of options, for those that the run does not name as it is older than they are.
        checkpoint: that the run goes on from, if it is known; it may be from elsewhere.

    Raises:
        ValueError: `output_dir` cannot be used, or belongs to another run; the message lists what
            differs.
    """
    check_writable(Path(output_dir))
    _check_directory(Path(output_dir), settings, defaults or {})
    if checkpoint and (fault := origin_fault(checkpoint, settings, defaults or {})):
        raise ValueError(f"{checkpoint}: {fault}")


def _check_directory(
    output_dir: Path, settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> None:
    path = output_dir / SETTINGS_FILE
    has_progress = any(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")) or any(
        output_dir.glob("*.safetensors")
    )
    if not path.exists() or not has_progress:
        return
    before = json_or_empty(path)
    if not before:
        raise ValueError(f"{path} is damaged: give another --output_dir")
    if changed := _changes(before, settings, defaults):
        raise ValueError(
            f"{output_dir} holds a run with other settings ({'; '.join(changed)}): "
            "give another --output_dir"
        )


def _changes(
    before: Mapping[str, Any], settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[str]:
    """Every setting that is not what it was."""
    now = json.loads(json.dumps(settings))
    before = {**json.loads(json.dumps(defaults)), **before}
    return [
        f"--{name} was {before.get(name)}, now {now.get(name)}"
        for name in sorted(now)
        if before.get(name) != now.get(name)
    ]


def write_settings(output_dir: str | Path, settings: Mapping[str, Any]) -> None:
    """Record what defines the run, for `check_settings`."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    write_json(Path(output_dir) / SETTINGS_FILE, settings)


def write_tracker(output_dir: str | Path, report_to: str | Sequence[str] | None) -> None:
    """Record the run's name in Weights & Biases, where `evaluate_math.py` adds its columns."""
    if "wandb" not in (report_to or ()):
        return
    import wandb

    if wandb.run is not None:
        place = {name: getattr(wandb.run, name) for name in ("id", "project", "entity")}
        write_json(Path(output_dir) / TRACKER_FILE, place)
