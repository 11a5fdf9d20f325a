"""Where a run stands on disk: which checkpoint to resume from, and under which settings."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.files import write_json

logger = logging.getLogger(__name__)

AUTO = "auto"
SETTINGS_FILE = "run.json"
TRACKER_FILE = "wandb_run.json"
_INCOMPLETE = "checkpoint-is-incomplete.txt"  # left behind by transformers when a save is cut off


def resolve(resume_from_checkpoint: str | None, output_dir: str | Path) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means: "auto" is the newest good one, if any.

    Raises:
        ValueError: a path was given and the checkpoint there is not good.
    """
    if resume_from_checkpoint in (None, AUTO):
        return find_checkpoint(output_dir)
    if fault := checkpoint_fault(str(resume_from_checkpoint)):
        raise ValueError(f"--resume_from_checkpoint {resume_from_checkpoint}: {fault}")
    return resume_from_checkpoint


def find_checkpoint(output_dir: str | Path) -> str | None:
    """The newest good checkpoint of a run, or None; worse ones are named in a warning."""
    found = [
        (int(match.group(1)), path)
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and (match := re.search(r"-(\d+)$", path.name))
    ]
    for _, path in sorted(found, reverse=True):
        if fault := checkpoint_fault(path):
            logger.warning("not resuming from %s: %s", path, fault)
        else:
            return str(path)
    return None


def is_finished(output_dir: str | Path) -> bool:
    """Whether a run has taken its last step and saved its model: the card is written last."""
    directory = Path(output_dir)
    state = _read_json(directory / "trainer_state.json")
    weights = list(directory.glob("*.safetensors"))
    return (
        state.get("global_step", 0) >= state.get("max_steps", sys.maxsize)
        and bool(weights)
        and all(map(_is_readable, weights))
        and (directory / "README.md").exists()
    )


def checkpoint_fault(path: str | Path) -> str | None:
    """What is wrong with a checkpoint, or None if a run can resume from it."""
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    if (path / _INCOMPLETE).exists():
        return "it was not finished"
    if not isinstance(_read_json(path / "trainer_state.json").get("global_step"), int):
        return "trainer_state.json is missing or damaged"
    return _sharded_fault(path) if any(path.glob("pytorch_model_fsdp_*")) else _weights_fault(path)


def _sharded_fault(path: Path) -> str | None:
    """What is wrong with weights and optimizer state that FSDP saved in pieces."""
    for kind in ("pytorch_model_fsdp", "optimizer"):
        shards = sorted(path.glob(f"{kind}_*"))
        if not shards or not all((shard / ".metadata").exists() for shard in shards):
            return f"{kind}_* is not complete"
    return None


def _weights_fault(path: Path) -> str | None:
    files = {file.name for file in path.glob("*.safetensors")}
    for index in path.glob("*.safetensors.index.json"):
        files |= set(_read_json(index).get("weight_map", {"": index.name}).values())
    if not files:
        return "it holds no weights"
    if damaged := next((name for name in sorted(files) if not _is_readable(path / name)), None):
        return f"{damaged} is missing or damaged"
    pickles = {"optimizer.pt", "scheduler.pt", *(file.name for file in path.glob("rng_state*"))}
    damaged = next((name for name in sorted(pickles) if not zipfile.is_zipfile(path / name)), None)
    return f"{damaged} is missing or damaged" if damaged else None


def _read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file; empty if there is none, or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_readable(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt"):  # compares the header with the file's length
            return True
    except (OSError, SafetensorError):
        return False


def check_settings(output_dir: str | Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under other settings than it was started with.

    Args:
        output_dir: where the run keeps everything.
        settings: what is known so far of what defines the run; the rest is not compared.

    Raises:
        ValueError: `output_dir` cannot be used, or belongs to another run; the message lists what
            differs.
    """
    _check_writable(Path(output_dir))
    path = Path(output_dir) / SETTINGS_FILE
    has_progress = any(Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")) or any(
        Path(output_dir).glob("*.safetensors")
    )
    if not path.exists() or not has_progress:
        return
    before = _read_json(path)
    if not before:
        raise ValueError(f"{path} is damaged: give another --output_dir")
    now = json.loads(json.dumps(settings))
    changed = [
        f"--{name} was {before.get(name)}, now {now.get(name)}"
        for name in sorted(now)
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{output_dir} holds a run with other settings ({'; '.join(changed)}): "
            "give another --output_dir"
        )


def _check_writable(output_dir: Path) -> None:
    place = next(place for place in (output_dir, *output_dir.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"--output_dir {output_dir}: {place} is a file, not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"--output_dir {output_dir}: {place} cannot be written to")


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
