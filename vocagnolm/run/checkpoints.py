"""The directory of a run: its settings and its lock; checkpoints that are whole or absent.

However a run is killed, the order of writes leaves no half checkpoint under its name:

    transformers        .saving/checkpoint-8: weights, optimizer, schedule, random states, state
    metrics             .saving/checkpoint-8/metrics_<process>.safetensors
    finish_checkpoint   the manifest of sizes, when all processes have written; then the rename
    rotate              the oldest go
"""

import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path

from filelock import FileLock, Timeout
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.io import (
    MANIFEST_FILE,
    RUN_FILE,
    JsonObject,
    check_writable,
    differences,
    json_or_empty,
    size_fault,
    write_json,
)

logger = logging.getLogger(__name__)

LOCK_FILE, CARD = ".lock", "README.md"
AUTO = "auto"
SAVING, _REPLACED = ".saving", "-replaced"
# A network file system may list another machine's files, and drop a dead one's lock, so late.
_VISIBLE_S, _LOCK_S = 60, 120
Settings = Mapping[str, object]


# -- The directory of a run --------------------------------------------------------------------


def check_settings(
    output_dir: str | Path, settings: Settings, checkpoint: str | None = None
) -> None:
    """Check that a directory, and a checkpoint that may be of another, are of a run like this one.

    Raises:
        ValueError: settings differ, or nothing can be written there.
    """
    directory = Path(output_dir)
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


def claim(output_dir: str | Path, settings: Settings) -> None:
    """Lock the directory of a run until `release` or the end of this process; write its settings.

    Raises:
        ValueError: another process keeps the lock.
    """
    directory = Path(output_dir).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    lock = _held.setdefault(directory, FileLock(directory / LOCK_FILE))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another run that writes to %s", directory)
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise ValueError(
                f"--output_dir {output_dir} is written to by another run: stop it, or give another"
            ) from None
    write_json(directory / RUN_FILE, settings)


def release(output_dir: str | Path) -> None:
    """Unlock a directory that `claim` has locked."""
    if lock := _held.pop(Path(output_dir).resolve(), None):
        lock.release(force=True)


def finish_run(output_dir: str | Path, names: Collection[str]) -> None:
    """Write the manifest of a final model, which has files of these names."""
    directory = Path(output_dir)
    files = {name: (directory / name).stat().st_size for name in (*names, TRAINER_STATE_NAME)}
    write_json(directory / MANIFEST_FILE, {"files": files})


def is_finished(output_dir: str | Path) -> bool:
    """Test whether a run has saved its model; the card is written last.

    Raises:
        ValueError: a file is damaged, and there is no checkpoint to write it again from.
    """
    directory = Path(output_dir)
    files = json_or_empty(directory / MANIFEST_FILE).get("files")
    if not files or not (directory / CARD).exists():
        return False
    if not (fault := size_fault(directory, files)):
        return True
    fault = f"{directory} holds a finished run, but {fault}"
    if newest_checkpoint(directory) is None:
        raise ValueError(f"{fault}, and no checkpoint: give another --output_dir")
    logger.warning("%s: writing it again from the newest checkpoint", fault)
    return False


# -- Checkpoints -------------------------------------------------------------------------------


def checkpoints(output_dir: str | Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, whole or not."""
    found = {}
    for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?", path.name):
            found[path] = int(match[1]), match[2] is None
    return sorted(found, key=found.__getitem__, reverse=True)


def step_of(checkpoint: str | Path) -> int:
    """Read the step of a checkpoint, whatever its name; 0 if it has none."""
    return int(json_or_empty(Path(checkpoint) / TRAINER_STATE_NAME).get("global_step", 0))


def run_of(checkpoint: str | Path) -> JsonObject:
    """Read the settings of the run that saved a checkpoint; empty if it has none."""
    settings: JsonObject = json_or_empty(Path(checkpoint) / MANIFEST_FILE).get("run", {})
    return settings


def checkpoint_fault(checkpoint: str | Path, settings: Settings | None = None) -> str | None:
    """Describe why a run with these settings cannot resume from a checkpoint; None if it can."""
    path = Path(checkpoint)
    if not path.is_dir():
        return "no such directory"
    files = json_or_empty(path / MANIFEST_FILE).get("files")
    if not files:
        return f"it has no {MANIFEST_FILE}: it was not finished, or another tool wrote it"
    if fault := size_fault(path, files):
        return fault
    before = run_of(path)
    if before and settings and (changed := differences(before, settings, prefix="--")):
        return f"it is of a run with other settings ({'; '.join(changed)})"
    return None


def newest_checkpoint(output_dir: str | Path, settings: Settings | None = None) -> str | None:
    """Return the newest checkpoint that a run can resume from; warn of newer ones."""
    for path in checkpoints(output_dir):
        fault = checkpoint_fault(path, settings)
        if fault is None:
            return str(path)
        logger.warning("not resuming from %s: %s", path, fault)
    return None


def resolve(
    resume_from_checkpoint: str | None, output_dir: str | Path, settings: Settings | None = None
) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, None to begin anew.

    "auto" is the newest good one, if any. A path is where the run begins; once it has saved a later
    step it resumes from there, so that a scheduler may start the same command again.

    Raises:
        ValueError: a path was given and the run cannot resume from there.
    """
    newest = newest_checkpoint(output_dir, settings)
    if resume_from_checkpoint in (None, AUTO):
        return newest
    path = str(resume_from_checkpoint)
    if newest is not None and step_of(newest) > step_of(path):
        return newest
    if fault := checkpoint_fault(path, settings):
        raise ValueError(f"--resume_from_checkpoint {path}: {fault}")
    return path


def sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory by their names, once they are on the disk."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            found[path.relative_to(directory).as_posix()] = path.stat().st_size
    return found


def finish_checkpoint(staged: Path, final: Path, about: Settings, files: Mapping[str, int]) -> None:
    """Write the manifest of a staged checkpoint, and give it its name.

    Raises:
        OSError: a file that another machine has written does not appear here.
    """
    for _ in range(_VISIBLE_S):
        missing = [name for name in files if not (staged / name).exists()]
        if not missing:
            break
        time.sleep(1)
    else:
        raise OSError(
            f"{staged} lacks {missing[0]}, which another process has written: --output_dir must be "
            "a directory that all machines share"
        )
    write_json(staged / MANIFEST_FILE, {**about, "files": files})
    _flush(staged)
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    staged.parent.rmdir()


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk; flushing a file does not flush its name."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond a limit, if there is one; the newest and best stay."""
    kept = {newest.name, Path(best or newest).name}
    others = [path for path in checkpoints(newest.parent) if path.name not in kept]
    if limit:
        for path in others[max(limit - len(kept), 0) :]:
            shutil.rmtree(path, ignore_errors=True)
