"""Checkpoints on the disk: found, judged whole, given their names, removed."""

import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.io import MANIFEST_FILE, differences, json_or_empty, size_fault, write_json

logger = logging.getLogger(__name__)

_REPLACED = "-replaced"
# A network file system may list another machine's files so late.
_VISIBLE_S = 60
Settings = Mapping[str, object]


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, whole or not."""
    pattern = rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?"
    ranks = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(pattern, path.name)
        if match:
            # Of the same step, one that was being replaced comes second.
            ranks[path] = int(match[1]), match[2] is None
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def step_of(checkpoint: str | Path) -> int:
    """Read the step of a checkpoint, whatever its name; 0 if it has none."""
    return int(json_or_empty(Path(checkpoint) / TRAINER_STATE_NAME).get("global_step", 0))


def checkpoint_fault(checkpoint: str | Path, settings: Settings | None = None) -> str | None:
    """Describe why a run with these settings cannot resume from a checkpoint; None if it can."""
    path = Path(checkpoint)
    if not path.is_dir():
        return "no such directory"
    manifest = json_or_empty(path / MANIFEST_FILE)
    files = manifest.get("files")
    if not files:
        return f"it has no {MANIFEST_FILE}: it was not finished, or another tool wrote it"
    fault = size_fault(path, files)
    if fault:
        return fault
    if not settings:
        return None
    before = manifest.get("run")
    if not before:
        return "it lacks the settings of its run, so that it may be of another one"
    changed = differences(before, settings, prefix="--")
    if changed:
        return f"it is of a run with other settings ({'; '.join(changed)})"
    return None


def newest_checkpoint(directory: Path, settings: Settings | None = None) -> str | None:
    """Return the newest checkpoint that a run can resume from; warn of newer ones."""
    for path in checkpoints(directory):
        fault = checkpoint_fault(path, settings)
        if fault is None:
            return str(path)
        logger.warning("not resuming from %s: %s", path, fault)
    return None


def resolve(option: str | None, directory: Path, settings: Settings | None = None) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, None to begin anew.

    "auto" is the newest good one, if any. A path is where the run begins; once it has saved a later
    step it resumes from there, so that a scheduler may start the same command again.

    Raises:
        ValueError: a path was given and the run cannot resume from there.
    """
    newest = newest_checkpoint(directory, settings)
    if option is None or option == "auto":
        return newest
    if newest is not None and step_of(newest) > step_of(option):
        return newest
    fault = checkpoint_fault(option, settings)
    if fault:
        raise ValueError(f"--resume_from_checkpoint {option}: {fault}")
    return option


def sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory by their names, once they are on the disk."""
    sizes_by_name = {}
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(directory).as_posix()
            sizes_by_name[name] = path.stat().st_size
    return sizes_by_name


def finish_checkpoint(
    staged: Path, final: Path, manifest: Settings, files: Mapping[str, int]
) -> None:
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
    write_json(staged / MANIFEST_FILE, {**manifest, "files": files})
    _flush(staged)
    # A checkpoint of the same step keeps another name until the new one has its own, so that a
    # process that is killed here leaves one of them whole.
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    # A network file system may keep the name of a file there that somebody still holds open.
    with suppress(OSError):
        staged.parent.rmdir()


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk; flushing a file does not flush its name."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond a limit, if there is one; the newest and best stay."""
    if not limit:
        return
    protected = {newest.name, Path(best or newest).name}
    candidates = [path for path in checkpoints(newest.parent) if path.name not in protected]
    for path in candidates[max(limit - len(protected), 0) :]:
        shutil.rmtree(path, ignore_errors=True)
