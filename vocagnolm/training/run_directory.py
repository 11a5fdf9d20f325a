"""The directory of a run: its settings, its checkpoints and its finished model."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.fields import OptionError, named
from vocagnolm.record import Record, check_output_directory, output_directory
from vocagnolm.shell.io import MANIFEST_FILE, RUN_FILE, json_or_empty, size_fault, write_json
from vocagnolm.training.extension import changes_of, grown

logger = logging.getLogger(__name__)

# A checkpoint has this ending while a new one of the same step takes over its name.
_REPLACED = "-replaced"
# A network file system may list the files of another machine up to this many seconds late.
_VISIBLE_S = 60


# -- How a run begins ----------------------------------------------------------------------------


def find_start(
    directory: Path,
    settings: Record,
    resume_from_checkpoint: str | None,
    documents: Sequence[str] = (),
) -> tuple[str, bool, str | None]:
    """Decide how a run begins in its directory.

    Returns:
        Why it cannot, or ""; whether it is finished; the checkpoint from which it resumes, if any.

    Raises:
        ValueError: the requested checkpoint, or the finished model, is damaged.
    """
    try:
        check_output_directory(directory, RUN_FILE, documents)
        check_settings(directory, settings)
    except ValueError as error:
        # Return the conflict and do not raise it, because a dry run prints it and continues.
        return str(error), False, None
    before = begun_settings(directory)
    is_longer = bool(before and grown(before, settings))
    # This comes after the check of the settings, because a finished run with others is another run.
    if not is_longer and is_finished(directory):
        return "", True, None
    checkpoint = resolve(resume_from_checkpoint, directory, settings)
    if checkpoint is None:
        # If a longer run was killed before it saved, only its checkpoints know the earlier length.
        for path in checkpoints(directory):
            shorter = json_or_empty(path / MANIFEST_FILE).get("run")
            if shorter and grown(shorter, settings):
                return f"{path}: {checkpoint_fault(path, settings)}", False, None
        if is_longer:
            return f"{directory} holds no checkpoint from which its run could go on", False, None
    return "", False, checkpoint


def check_settings(directory: Path, settings: Record) -> None:
    """Check that a directory holds no run with other settings.

    Raises:
        ValueError: settings differ.
    """
    settings_there = begun_settings(directory)
    if not settings_there:
        return
    newest = next(iter(checkpoints(directory)), None)
    changes = changes_of(settings_there, settings, newest)
    if changes:
        raise ValueError(
            f"{directory} holds a run with other settings ({'; '.join(changes)}): give another "
            f"{named('output_dir')}"
        )


def begun_settings(directory: Path) -> Record:
    """Return the settings of a run. Until it has saved something, they may change, and are {}."""
    return json_or_empty(directory / RUN_FILE) if holds_results(directory) else {}


def holds_results(directory: Path) -> bool:
    """Test whether a run has saved a model or a checkpoint."""
    patterns = (f"{PREFIX_CHECKPOINT_DIR}-*", "*.safetensors")
    return any(any(directory.glob(pattern)) for pattern in patterns)


def owned(directory: Path, settings: Record, *, is_new: bool) -> AbstractContextManager[None]:
    """Keep other runs out of a run's directory. A new run moves an earlier one aside.

    Raises:
        ValueError: the run reads a model there that it would move.
    """
    moves = is_new and holds_results(directory)
    models = [settings.get("student"), *(settings.get("teacher") or ())]
    if moves and str(directory.resolve()) in models:
        raise OptionError(
            "output_dir",
            f"{directory} has the student or a teacher of this run: give another directory",
        )
    return output_directory(directory, RUN_FILE, move_aside=moves)


def reopen(directory: Path, settings: Record) -> None:
    """Mark a finished run as unfinished if it becomes longer, before its settings say so.

    Its evaluations judged its last step, and get the names of evaluations of that checkpoint.
    """
    if not grown(json_or_empty(directory / RUN_FILE), settings):
        return
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    for path in sorted(directory.glob("evaluation*")):
        if f"-{PREFIX_CHECKPOINT_DIR}-" in path.name:
            continue
        target = path.with_name(f"{path.name}-{PREFIX_CHECKPOINT_DIR}-{step_of(directory)}")
        # Somebody may have evaluated the checkpoint, too.
        while target.exists():
            target = target.with_name(f"{target.name}-again")
        path.rename(target)
        logger.warning("%s is of the shorter run, and is %s now", path, target.name)


def describe_run(
    directory: Path, settings: Record, skipped: Mapping[str, Sequence[tuple[int, str]]]
) -> None:
    """Write a run's settings into its directory, with lists of the documents that it skips."""
    if settings:
        write_json(directory / RUN_FILE, settings)
    for name, reasons in skipped.items():
        lines = []
        for index, reason in reasons:
            lines.append(json.dumps({"document": index, "reason": reason}) + "\n")
        # If a kill cuts off a list, the resumed run writes it again before it trains.
        (directory / name).write_text("".join(lines), encoding="utf-8")


# -- Checkpoints ---------------------------------------------------------------------------------


def checkpoints(directory: Path) -> list[Path]:
    """List the checkpoints of a run, newest first, complete or not."""
    pattern = rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?"
    ranks = {}
    for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        match = re.fullmatch(pattern, path.name)
        # A directory with another name, such as a user's copy, is not the run's. It is neither
        # resumed from nor removed.
        if match:
            # Two checkpoints of one step exist only after a kill in `finish_checkpoint`. The one
            # without the ending is newer, so it comes first.
            ranks[path] = int(match[1]), match[2] is None
    # Compare steps as numbers, because as text checkpoint-1000 comes before checkpoint-250.
    return sorted(ranks, key=ranks.__getitem__, reverse=True)


def step_of(checkpoint: str | Path) -> int:
    """Return the step of a checkpoint, whatever its name, or 0 if it has none."""
    return int(json_or_empty(Path(checkpoint) / TRAINER_STATE_NAME).get("global_step", 0))


def checkpoint_fault(checkpoint: str | Path, settings: Record | None = None) -> str | None:
    """Return why a run with these settings cannot resume from a checkpoint, or None."""
    path = Path(checkpoint)
    if not path.is_dir():
        return "no such directory"
    # The manifest is written last, so a directory without one is an incomplete save, or another
    # program's.
    manifest = json_or_empty(path / MANIFEST_FILE)
    files = manifest.get("files")
    if not files:
        return f"it has no {MANIFEST_FILE}, so it was not finished, or another tool wrote it"
    # Sizes reveal truncated files without reading gigabytes of weights.
    fault = size_fault(path, files)
    if fault:
        return fault
    # A caller without its own run, such as an export of the weights, gives no settings.
    if not settings:
        return None
    before = manifest.get("run")
    if not before:
        return "it lacks the settings of its run, so that it may be of another one"
    # One that `save_only_model` wrote would silently train on with a new optimizer.
    if not any(name.startswith("optimizer") for name in files):
        return "it has no state of an optimizer"
    changes = changes_of(before, settings, path)
    if changes:
        return f"it is of a run with other settings ({'; '.join(changes)})"
    return None


def newest_checkpoint(directory: Path, settings: Record | None = None) -> str | None:
    """Return the newest checkpoint that a run can resume from, and warn about newer ones."""
    for path in checkpoints(directory):
        # An older checkpoint costs the steps since then, which is better than a run that cannot
        # resume.
        fault = checkpoint_fault(path, settings)
        if fault is None:
            return str(path)
        logger.warning("not resuming from %s: %s", path, fault)
    return None


def resolve(option: str | None, directory: Path, settings: Record | None = None) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` means, or None to start over.

    "auto" is the newest good one, if any. A path is where the run begins. After the run has saved a
    later step, it resumes from there, so that a scheduler can start the same command again.

    Raises:
        ValueError: a path was given and the run cannot resume from there.
    """
    newest = newest_checkpoint(directory, settings)
    if option is None or option == "auto":
        return newest
    # Compare steps and not paths, because the option may name a checkpoint in another directory,
    # from which this run has branched off.
    if newest is not None and step_of(newest) > step_of(option):
        return newest
    fault = checkpoint_fault(option, settings)
    if fault:
        raise OptionError("resume_from_checkpoint", f"{option}: {fault}")
    return option


def sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory by name, after flushing them to the disk."""
    sizes_by_name = {}
    for path in directory.rglob("*"):
        if path.is_dir():
            # The names in a directory are flushed separately from the contents of its files.
            _flush(path)
        elif path.is_file():
            # The libraries that wrote these files did not wait for the disk. If the renamed
            # directory reached the disk before the bytes, a crash would leave empty files in a
            # checkpoint that looks complete.
            with path.open("rb") as file:
                os.fsync(file.fileno())
            name = path.relative_to(directory).as_posix()
            sizes_by_name[name] = path.stat().st_size
    return sizes_by_name


def finish_checkpoint(
    staged: Path, final: Path, manifest: Record, files: Mapping[str, int]
) -> None:
    """Write the manifest of a staged checkpoint, and give it its name.

    Raises:
        OSError: a file that another machine has written does not appear here.
    """
    # All processes have finished writing, but this machine may still have an old listing of the
    # directory. So look again once a second.
    for _ in range(_VISIBLE_S):
        missing_files = [name for name in files if not (staged / name).exists()]
        if not missing_files:
            break
        time.sleep(1)
    else:
        raise OSError(
            f"{staged} lacks {missing_files[0]}, which another process has written: "
            f"{named('output_dir')} must be a directory that all machines share"
        )
    # The manifest declares the checkpoint complete, so it comes after all other files.
    write_json(staged / MANIFEST_FILE, {**manifest, "files": files})
    # The names of the files must be on the disk before the directory gets its own.
    _flush(staged)
    # A checkpoint of the same step keeps another name until the new one has its own, so that a kill
    # at this point leaves one of them complete.
    replaced = final.with_name(final.name + _REPLACED)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    # Older checkpoints are removed from here on. If the new name were not on the disk before that,
    # a power failure could leave neither.
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    # A network file system may keep a file's name there while somebody has it open.
    with suppress(OSError):
        staged.parent.rmdir()


def _flush(directory: Path) -> None:
    """Flush the names in a directory to the disk, which flushing a file does not do."""
    handle = os.open(directory, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond a limit, if it is above 0. The newest and best stay."""
    if limit is None or limit <= 0:
        return
    # Without a best checkpoint, the newest one takes its place, and the set has one name.
    protected = {newest.name, Path(best or newest).name}
    candidates = [path for path in checkpoints(newest.parent) if path.name not in protected]
    # Protected checkpoints count towards the limit. The candidates are sorted from new to old, so
    # the rest of the list are the oldest.
    for path in candidates[max(limit - len(protected), 0) :]:
        # What cannot be removed now, for example because somebody reads it, is tried again at the
        # next save.
        shutil.rmtree(path, ignore_errors=True)


# -- The finished model --------------------------------------------------------------------------


def finish_run(directory: Path, names: Collection[str]) -> None:
    """Write the manifest of a final model with these files."""
    # List Trainer's state, too, because a finished run is read for its log.
    files = {name: (directory / name).stat().st_size for name in (*names, TRAINER_STATE_NAME)}
    write_json(directory / MANIFEST_FILE, {"files": files})


def is_finished(directory: Path) -> bool:
    """Test whether a run has saved its model. The card is written last.

    Raises:
        ValueError: a file is damaged, and there is no checkpoint from which to write it again.
    """
    files = json_or_empty(directory / MANIFEST_FILE).get("files")
    # A manifest without a card means that the run ended between the two, for example during the
    # push.
    if not files or not (directory / "README.md").exists():
        return False
    fault = size_fault(directory, files)
    if not fault:
        return True
    # The run can write its model again as long as it has a checkpoint.
    fault = f"{directory} holds a finished run, but {fault}"
    if newest_checkpoint(directory) is None:
        raise ValueError(f"{fault}, and no checkpoint: give another {named('output_dir')}")
    logger.warning("%s: writing it again from the newest checkpoint", fault)
    return False
