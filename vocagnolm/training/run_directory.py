"""The directory of a run: whose it is, who writes to it, and whether it is finished."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.fields import named
from vocagnolm.shell.io import (
    MANIFEST_FILE,
    RUN_FILE,
    check_writable,
    json_or_empty,
    size_fault,
    write_json,
)
from vocagnolm.training.checkpoints import (
    Settings,
    changed_settings,
    checkpoint_fault,
    checkpoints,
    newest_checkpoint,
    resolve,
)
from vocagnolm.training.log import LOG_FILE

logger = logging.getLogger(__name__)

# Checkpoints are not among them, because a run never overwrites one.
_FILES_OF_A_RUN = (
    RUN_FILE,
    LOG_FILE,
    MANIFEST_FILE,
    "README.md",
    "*.safetensors",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
# What only training writes. A script may have saved a model or a tokenizer there before it trains.
LOGS_OF_A_RUN = (RUN_FILE, LOG_FILE, TRAINER_STATE_NAME)
# A network file system may release the lock of a dead machine up to this many seconds late.
_LOCK_S = 120


def check_settings(directory: Path, settings: Settings, checkpoint: str | None = None) -> None:
    """Check that the output directory and the checkpoint belong to a run with these settings.

    Raises:
        ValueError: settings differ, or nothing can be written there.
    """
    # Otherwise a directory without write permission would fail at the first file, after the
    # alignment.
    check_writable(directory)
    settings_there = json_or_empty(directory / RUN_FILE)
    # Until something is saved, the user may still change the settings.
    saved_files = chain(
        directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), directory.glob("*.safetensors")
    )
    changes = []
    if settings_there and any(saved_files):
        changes = changed_settings(settings_there, settings)
    if changes:
        raise ValueError(
            f"{directory} holds a run with other settings ({'; '.join(changes)}): give another "
            f"{named('output_dir')}"
        )
    # The checkpoint may be in another directory, so compare its settings as well.
    fault = checkpoint_fault(checkpoint, settings) if checkpoint else None
    if fault:
        raise ValueError(f"{checkpoint}: {fault}")


@dataclass(frozen=True)
class Start:
    """How a run begins in its directory.

    Attributes:
        conflict: why it cannot; None if it can.
        is_finished: it was run to its end before.
        checkpoint: what it resumes from; None to begin anew.
    """

    conflict: str | None = None
    is_finished: bool = False
    checkpoint: str | None = None


def find_start(directory: Path, settings: Settings, resume_from_checkpoint: str | None) -> Start:
    """Look at the directory of a run, and decide how it begins there.

    Raises:
        ValueError: the requested checkpoint, or the finished model, is damaged.
    """
    try:
        check_settings(directory, settings)
    except ValueError as error:
        # Return the conflict and do not raise it, because a dry run prints it and continues.
        return Start(conflict=str(error))
    conflict = foreign_file_fault(directory)
    if conflict:
        return Start(conflict=conflict)
    # This comes after the check of the settings, because a finished run with others is another run.
    if is_finished(directory):
        return Start(is_finished=True)
    return Start(checkpoint=resolve(resume_from_checkpoint, directory, settings))


def set_aside(directory: Path) -> Path | None:
    """Move what an earlier run has saved, if anything, into a new directory, and return it.

    Otherwise a run that starts over would keep that run's later checkpoints instead of its own, and
    resume from them. Its own log and the earlier run's model and accuracy would look like one run.
    """
    checkpoints_there = checkpoints(directory)
    files: list[Path] = []
    if "method" in json_or_empty(directory / RUN_FILE):
        for pattern in (*_FILES_OF_A_RUN, "skipped*.jsonl", "evaluation*"):
            files += directory.glob(pattern)
    # Settings and a log alone are of a run that has saved nothing.
    if not checkpoints_there and not any(file.suffix == ".safetensors" for file in files):
        return None
    number = 1
    while (directory / f"earlier-{number}").exists():
        number += 1
    target = directory / f"earlier-{number}"
    target.mkdir()
    for path in checkpoints_there + files:
        path.rename(target / path.name)
    return target


def own_model_fault(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """Return why a run cannot start in a directory if it reads a model there, or None."""
    if str(directory.resolve()) in [settings.get("student"), *(settings.get("teacher") or ())]:
        return f"--output_dir {directory} has the student or a teacher of this run: give another"
    return None


def foreign_file_fault(directory: Path, patterns: Collection[str] = _FILES_OF_A_RUN) -> str | None:
    """Return why a run cannot start if it would overwrite a file that no run has made, or None."""
    # A run describes itself first. Without that, the model may be anybody's, even the student's
    # own, or the manifest a store's.
    if "method" not in json_or_empty(directory / RUN_FILE):
        for pattern in patterns:
            for path in directory.glob(pattern):
                return (
                    f"--output_dir {directory} holds {path.name}, which vocagnolm train did not "
                    "write there: give another directory, or move it away"
                )
    return None


# The locks that this process holds. A file lock counts its claims, so one object must serve all
# claims of a directory.
_locks: dict[Path, FileLock] = {}


def claim(directory: Path, option: str = "--output_dir") -> None:
    """Lock the directory of a run, or another one that an option names.

    The same process may claim it again. Each `release` undoes one claim.

    Raises:
        ValueError: another process has the lock.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = _locks.setdefault(directory.resolve(), FileLock(directory / ".lock"))
    try:
        # The first try does not wait, so that the warning below comes before the wait.
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another run that writes to %s", directory)
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise ValueError(
                f"{option} {directory} is written to by another run: stop it, or give another"
            ) from None


def release(directory: Path) -> None:
    """Undo a claim. After the last one, another process may write to the directory."""
    lock = _locks.get(directory.resolve())
    if lock is None:
        return
    lock.release()
    # Keep a lock that still has claims, because the command claims the directory around the
    # trainer.
    if not lock.is_locked:
        del _locks[directory.resolve()]


def describe_run(
    directory: Path, settings: Settings, skipped: Mapping[str, Sequence[tuple[int, str]]]
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
