"""The directory of a run: whose it is, who writes to it, whether it is finished."""

import logging
from collections.abc import Collection
from itertools import chain
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.io import (
    MANIFEST_FILE,
    RUN_FILE,
    check_writable,
    differences,
    json_or_empty,
    size_fault,
    write_json,
)
from vocagnolm.training.checkpoints import Settings, checkpoint_fault, newest_checkpoint

logger = logging.getLogger(__name__)

# A network file system may drop the lock of a dead machine so late.
_LOCK_S = 120


def check_settings(directory: Path, settings: Settings, checkpoint: str | None = None) -> None:
    """Check that a directory, and a checkpoint that may be of another, are of a run like this one.

    Raises:
        ValueError: settings differ, or nothing can be written there.
    """
    check_writable(directory)
    before = json_or_empty(directory / RUN_FILE)
    # Settings alone bind nobody: a run that was stopped before it saved may be given others.
    progress = chain(directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), directory.glob("*.safetensors"))
    if before and any(progress) and (changed := differences(before, settings, prefix="--")):
        raise ValueError(
            f"{directory} holds a run with other settings ({'; '.join(changed)}): give another "
            "--output_dir"
        )
    if checkpoint and (fault := checkpoint_fault(checkpoint, settings)):
        raise ValueError(f"{checkpoint}: {fault}")


_held: dict[Path, FileLock] = {}


def claim(directory: Path, settings: Settings) -> None:
    """Lock the directory of a run until `release` or the end of this process; write its settings.

    Raises:
        ValueError: another process keeps the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = _held.setdefault(directory.resolve(), FileLock(directory / ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another run that writes to %s", directory)
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise ValueError(
                f"--output_dir {directory} is written to by another run: stop it, or give another"
            ) from None
    write_json(directory / RUN_FILE, settings)


def release(directory: Path) -> None:
    """Unlock a directory that `claim` has locked."""
    if lock := _held.pop(directory.resolve(), None):
        lock.release(force=True)


def finish_run(directory: Path, names: Collection[str]) -> None:
    """Write the manifest of a final model, which has files of these names."""
    files = {name: (directory / name).stat().st_size for name in (*names, TRAINER_STATE_NAME)}
    write_json(directory / MANIFEST_FILE, {"files": files})


def is_finished(directory: Path) -> bool:
    """Test whether a run has saved its model; the card is written last.

    Raises:
        ValueError: a file is damaged, and there is no checkpoint to write it again from.
    """
    files = json_or_empty(directory / MANIFEST_FILE).get("files")
    if not files or not (directory / "README.md").exists():
        return False
    if not (fault := size_fault(directory, files)):
        return True
    fault = f"{directory} holds a finished run, but {fault}"
    if newest_checkpoint(directory) is None:
        raise ValueError(f"{fault}, and no checkpoint: give another --output_dir")
    logger.warning("%s: writing it again from the newest checkpoint", fault)
    return False
