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

# A checkpoint has this ending while a new one of the same step takes over its name.
_REPLACED = "-replaced"
# A network file system may list the files of another machine up to this many seconds late.
_VISIBLE_S = 60
Settings = Mapping[str, object]


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, the newest first, whole or not."""
    pattern = rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?"
    ranks = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(pattern, path.name)
        # A directory of another name, such as a copy that the user made, is none of the run's: it
        # is neither resumed from nor removed.
        if match:
            # Two checkpoints of one step exist only after a kill in `finish_checkpoint`. The one
            # without the ending is the newer, so it sorts first.
            ranks[path] = int(match[1]), match[2] is None
    # Steps are compared as numbers: as text checkpoint-1000 comes before checkpoint-250.
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def step_of(checkpoint: str | Path) -> int:
    """Read the step of a checkpoint, whatever its name; 0 if it has none."""
    return int(json_or_empty(Path(checkpoint) / TRAINER_STATE_NAME).get("global_step", 0))


def checkpoint_fault(checkpoint: str | Path, settings: Settings | None = None) -> str | None:
    """Describe why a run with these settings cannot resume from a checkpoint; None if it can."""
    path = Path(checkpoint)
    if not path.is_dir():
        return "no such directory"
    # The manifest is written last, so a directory without one is a save that was cut off, or the
    # work of another program.
    manifest = json_or_empty(path / MANIFEST_FILE)
    files = manifest.get("files")
    if not files:
        return f"it has no {MANIFEST_FILE}: it was not finished, or another tool wrote it"
    # Sizes reveal files that were cut off or copied in part, without reading gigabytes of weights.
    fault = size_fault(path, files)
    if fault:
        return fault
    # A caller without a run of its own, such as an export of the weights, gives no settings.
    if not settings:
        return None
    before = manifest.get("run")
    if not before:
        return "it lacks the settings of its run, so that it may be of another one"
    changes = differences(before, settings, prefix="--")
    if changes:
        return f"it is of a run with other settings ({'; '.join(changes)})"
    return None


def newest_checkpoint(directory: Path, settings: Settings | None = None) -> str | None:
    """Return the newest checkpoint that a run can resume from; warn of newer ones."""
    for path in checkpoints(directory):
        # An older checkpoint costs the steps since, which is better than a run that cannot go on.
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
    # The steps are compared and not the paths, since the option may name a checkpoint of another
    # directory, from which this run has branched off.
    if newest is not None and step_of(newest) > step_of(option):
        # The checkpoint may have been removed since the run began. It may also be a slip.
        if not Path(option).is_dir():
            logger.warning(
                "--resume_from_checkpoint %s: no such directory; resuming from %s",
                option,
                newest,
            )
        return newest
    fault = checkpoint_fault(option, settings)
    if fault:
        raise ValueError(f"--resume_from_checkpoint {option}: {fault}")
    return option


def set_aside(directory: Path) -> Path | None:
    """Move the checkpoints of an earlier run into a new directory, and return it, if there are any.

    Otherwise a run that begins anew would keep those of later steps instead of its own, and resume
    from them.
    """
    earlier = checkpoints(directory)
    if not earlier:
        return None
    number = 1
    while (directory / f"earlier-{number}").exists():
        number += 1
    target = directory / f"earlier-{number}"
    target.mkdir()
    for path in earlier:
        path.rename(target / path.name)
    return target


def sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory by their names, once they are on the disk."""
    sizes_by_name = {}
    for path in directory.rglob("*"):
        if path.is_dir():
            # The disk gets the names in a directory apart from the contents of its files.
            _flush(path)
        elif path.is_file():
            # The libraries that wrote these files did not wait for the disk. If the rename of the
            # directory reached it before the bytes did, a crash would leave empty files under the
            # name of a whole checkpoint.
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
    # All processes have written by now, but this machine may still have an old listing of the
    # directory. The loop looks again once a second.
    for _ in range(_VISIBLE_S):
        missing_files = [name for name in files if not (staged / name).exists()]
        if not missing_files:
            break
        time.sleep(1)
    else:
        raise OSError(
            f"{staged} lacks {missing_files[0]}, which another process has written: --output_dir "
            "must be a directory that all machines share"
        )
    # The manifest declares the checkpoint whole, so it comes after all other files.
    write_json(staged / MANIFEST_FILE, {**manifest, "files": files})
    # The names of the files must be on the disk before the directory gets its own.
    _flush(staged)
    # A checkpoint of the same step keeps another name until the new one has its own, so that a
    # process that is killed here leaves one of them whole.
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    # Older checkpoints are removed from here on. If the new name were not on the disk before that,
    # a power failure could leave neither the old nor the new one.
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
    # Without a best checkpoint the newest one stands in for it, and the set holds one name.
    protected = {newest.name, Path(best or newest).name}
    candidates = [path for path in checkpoints(newest.parent) if path.name not in protected]
    # The protected ones count towards the limit. The candidates are sorted from new to old, so the
    # rest of the list holds the oldest.
    for path in candidates[max(limit - len(protected), 0) :]:
        # What cannot be removed now, as when somebody reads it, is tried again at the next save.
        shutil.rmtree(path, ignore_errors=True)
