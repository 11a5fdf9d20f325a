"""Where a run stands on disk: which checkpoint to resume from, and under which settings."""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

AUTO = "auto"
SETTINGS_FILE = "run.json"
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


def checkpoint_fault(path: str | Path) -> str | None:
    """What is wrong with a checkpoint, or None if a run can resume from it."""
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    if (path / _INCOMPLETE).exists():
        return "it was not finished"
    state = path / "trainer_state.json"
    try:
        json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, KeyError):
        return f"{state.name} is missing or damaged"
    if not (sharded := sorted(path.glob("pytorch_model_fsdp_*"))):
        if fault := _weights_fault(path):
            return fault
        for name in ("optimizer.pt", "scheduler.pt"):
            if not zipfile.is_zipfile(path / name):
                return f"{name} is missing or damaged"
    elif not all((shard / ".metadata").exists() for shard in sharded):
        return f"{sharded[0].name} is not complete"
    return None


def _weights_fault(path: Path) -> str | None:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        return "it holds no weights"
    damaged = next((file.name for file in files if not _is_readable(file)), None)
    return f"{damaged} is damaged" if damaged else None


def _is_readable(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt"):  # compares the header with the file's length
            return True
    except (OSError, SafetensorError):
        return False


def check_settings(output_dir: str | Path, settings: Mapping[str, Any]) -> None:
    """Refuse to go on with a run under other settings than it was started with.

    Raises:
        ValueError: `output_dir` belongs to another run; the message lists what differs.
    """
    path = Path(output_dir) / SETTINGS_FILE
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: give another --output_dir") from error
    now = json.loads(json.dumps(settings))
    changed = [
        f"--{name} was {before.get(name)}, now {now.get(name)}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{output_dir} holds a run with other settings ({'; '.join(changed)}): "
            "give another --output_dir"
        )


def write_settings(output_dir: str | Path, settings: Mapping[str, Any]) -> None:
    """Record what defines the run, for `check_settings`."""
    path = Path(output_dir) / SETTINGS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
