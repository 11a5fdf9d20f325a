"""The directory of a run: how it begins there, what describes it, and whether it is finished."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.fields import OptionError, named
from vocagnolm.record import Record, check_output_directory, differences
from vocagnolm.shell.io import MANIFEST_FILE, RUN_FILE, json_or_empty, size_fault, write_json
from vocagnolm.training.checkpoints import (
    checkpoint_fault,
    newest_checkpoint,
    resolve,
)

logger = logging.getLogger(__name__)


def check_settings(directory: Path, settings: Record, checkpoint: str | None = None) -> None:
    """Check that the output directory and the checkpoint belong to a run with these settings.

    Raises:
        ValueError: settings differ.
    """
    settings_there = json_or_empty(directory / RUN_FILE)
    # Until something is saved, the user may still change the settings.
    changes = []
    if settings_there and holds_results(directory):
        changes = differences(settings_there, settings)
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


def find_start(
    directory: Path,
    settings: Record,
    resume_from_checkpoint: str | None,
    documents: Sequence[str] = (),
) -> Start:
    """Look at the directory of a run, and decide how it begins there.

    Raises:
        ValueError: the requested checkpoint, or the finished model, is damaged.
    """
    try:
        check_output_directory(directory, RUN_FILE, documents)
        check_settings(directory, settings)
    except ValueError as error:
        # Return the conflict and do not raise it, because a dry run prints it and continues.
        return Start(conflict=str(error))
    # This comes after the check of the settings, because a finished run with others is another run.
    if is_finished(directory):
        return Start(is_finished=True)
    return Start(checkpoint=resolve(resume_from_checkpoint, directory, settings))


def holds_results(directory: Path) -> bool:
    """Test whether a run has saved a model or a checkpoint."""
    patterns = (f"{PREFIX_CHECKPOINT_DIR}-*", "*.safetensors")
    return any(any(directory.glob(pattern)) for pattern in patterns)


def check_models(directory: Path, settings: Record) -> None:
    """Raise a ValueError if a run would move away a model that it reads."""
    models = [settings.get("student"), *(settings.get("teacher") or ())]
    if str(directory.resolve()) in models:
        raise OptionError(
            "output_dir", f"{directory} has the student or a teacher of this run: give another"
        )


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
