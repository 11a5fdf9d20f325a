"""Where a run stands on disk: its checkpoints, and whether it is finished."""

from __future__ import annotations

import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.host.files import json_or_empty
from vocagnolm.host.manifest import (
    MANIFEST_FILE,
    content_bytes,
    content_fault,
    read_manifest,
    write_manifest,
)
from vocagnolm.host.settings import RUN_FILE

logger = logging.getLogger(__name__)

AUTO = "auto"
_REPLACED = "-replaced"  # the end of the name of a checkpoint while its step is saved again
_METRICS = "metrics_*.safetensors"  # of `training.metrics`, which transformers alone has not
_LARGE_BYTES = 10**9
_VISIBLE_S = 60
Origin = Callable[[Path], "str | None"]  # why a checkpoint is not of this run, if it is not


def _anywhere(path: Path) -> None:
    """Every checkpoint will do."""


def resolve(
    resume_from_checkpoint: str | None,
    output_dir: str | Path,
    tell: Callable[[str], object] = logger.info,
    origin: Origin = _anywhere,
) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` means: "auto" is the newest good one, if any.

    A path is where the run begins. Once it has saved a later step it goes on from there, so that a
    scheduler may start the same command again.

    Args:
        resume_from_checkpoint: the option.
        output_dir: of the run.
        tell: is told what takes a while.
        origin: says why a checkpoint is not of this run.

    Raises:
        ValueError: a path was given and the checkpoint there is not good.
    """
    newest = find_checkpoint(output_dir, tell, origin)
    if resume_from_checkpoint in (None, AUTO):
        return newest
    path = Path(str(resume_from_checkpoint))
    if newest is not None and (_step(Path(newest)) or 0) > _step_of(path):
        tell(f"{newest} is newer than --resume_from_checkpoint {path}")
        return newest
    if fault := checkpoint_fault(path, tell, origin):
        raise ValueError(f"--resume_from_checkpoint {path}: {fault}")
    return str(path)


def find_checkpoint(
    output_dir: str | Path,
    tell: Callable[[str], object] = logger.info,
    origin: Origin = _anywhere,
) -> str | None:
    """The newest good checkpoint of a run, or None; worse ones are named in a warning."""
    for path in sorted(_checkpoints(Path(output_dir)), key=_age, reverse=True):
        if fault := checkpoint_fault(path, tell, origin):
            logger.warning("not resuming from %s: %s", path, fault)
        else:
            return str(path)
    return None


def _checkpoints(output_dir: Path) -> list[Path]:
    found = output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return [path for path in found if path.is_dir() and _step(path) is not None]


def _step(path: Path) -> int | None:
    """The step that a checkpoint's name tells."""
    match = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?", path.name)
    return int(match.group(1)) if match else None


def _step_of(path: Path) -> int:
    """The step of a checkpoint by its name, or by what it holds."""
    step = _step(path)
    if step is None:
        step = json_or_empty(path / "trainer_state.json").get("global_step")
    return step if isinstance(step, int) else 0


def _age(path: Path) -> tuple[int, bool]:
    return _step(path) or 0, not path.name.endswith(_REPLACED)


def is_finished(output_dir: str | Path) -> bool:
    """Whether a run has taken its last step and saved its model: the card is written last."""
    directory = Path(output_dir)
    state = json_or_empty(directory / "trainer_state.json")
    weights = list(directory.glob("*.safetensors"))
    return (
        state.get("global_step", 0) >= state.get("max_steps", sys.maxsize)
        and bool(weights)
        and all(map(_is_readable, weights))
        and (directory / "README.md").exists()
    )


def checkpoint_fault(
    path: str | Path,
    tell: Callable[[str], object] = logger.info,
    origin: Origin = _anywhere,
) -> str | None:
    """What is wrong with a checkpoint, of which every byte is read; None if it is good.

    Args:
        path: of the checkpoint.
        tell: is told what takes a while.
        origin: says why a checkpoint is not of this run.
    """
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    try:
        return origin(path) or _content_fault(path, tell)
    except OSError as error:  # a bad sector, or files that vanish from a network file system
        return f"it cannot be read ({error})"


def _content_fault(path: Path, tell: Callable[[str], object]) -> str | None:
    step = json_or_empty(path / "trainer_state.json").get("global_step")
    if not isinstance(step, int):
        return "trainer_state.json is missing or damaged"
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return str(error)
    for what, found in (("trainer_state.json", step), ("its name", _step(path))):
        if found is not None and found != manifest.get("step"):
            return f"{MANIFEST_FILE} is of step {manifest.get('step')}, {what} of step {found}"
    if (size := content_bytes(manifest)) > _LARGE_BYTES:
        tell(f"checking the {size / 1e9:.1f} GB of {path}")
    return content_fault(path, manifest)


# -- Writing -----------------------------------------------------------------------------------


def is_complete(path: Path) -> bool:
    """Whether a checkpoint was written to its end; `checkpoint_fault` says whether it still is."""
    return (path / MANIFEST_FILE).exists()


def make_room(path: Path) -> None:
    """Prepare for a checkpoint to be written: one that is half-written goes.

    A finished one of the same step is put aside, where `find_checkpoint` sees it, until `finish`.
    """
    if is_complete(path):
        aside = path.with_name(path.name + _REPLACED)
        if aside.exists():
            _remove(aside)
        path.rename(aside)
    elif path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def finish(path: Path, step: int, world_size: int, expected: Sequence[str]) -> None:
    """Declare a checkpoint complete, when all processes have written it.

    Args:
        path: of the checkpoint.
        step: the last one that it holds.
        world_size: how many processes wrote it.
        expected: names of the files that the processes have written, as each of them sees it.

    Raises:
        OSError: they are not there.
    """
    for _ in range(_VISIBLE_S):
        missing = [name for name in expected if not (path / name).exists()]
        if not missing:
            break
        time.sleep(1)  # a network file system shows what another machine wrote a little later
    else:
        raise OSError(
            f"{path} lacks {missing[0]}, which another process has written: --output_dir must be "
            "a directory that all machines share"
        )
    run = json_or_empty(path.parent / RUN_FILE)
    write_manifest(path, {"step": step, "world_size": world_size, "run": run}, expected)
    aside = path.with_name(path.name + _REPLACED)
    if aside.exists():
        _remove(aside)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond a limit, unfinished ones first, but not another tool's.

    Args:
        newest: the checkpoint that was finished last, which stays.
        limit: how many stay; None or 0 for all.
        best: one that stays too, if there is one.
    """
    if not limit or limit < 0:
        return
    spared = {newest.name} | ({Path(best).name} if best and Path(best).exists() else set())

    def worth(path: Path) -> tuple[bool, bool, tuple[int, bool]]:
        return path.name in spared, is_complete(path), _age(path)

    by_worth = sorted(filter(_is_ours, _checkpoints(newest.parent)), key=worth, reverse=True)
    for path in by_worth[max(limit, len(spared)) :]:
        _remove(path)


def _is_ours(path: Path) -> bool:
    """Whether a checkpoint is finished, or what a save of ours left that was cut off."""
    is_whole_elsewhere = (path / "trainer_state.json").exists()  # transformers writes it last
    return is_complete(path) or not is_whole_elsewhere or any(path.glob(_METRICS))


def _remove(path: Path) -> None:
    if path.is_symlink():  # what it stands for is the user's
        path.unlink()
        return
    (path / MANIFEST_FILE).unlink(missing_ok=True)  # so that half of it is no checkpoint
    shutil.rmtree(path, ignore_errors=True)


def change_of_processes(path: Path, world_size: int) -> str | None:
    """What it changes that a checkpoint was saved by another number of processes, if it was."""
    before = json_or_empty(path / MANIFEST_FILE).get("world_size", world_size)
    if before == world_size:
        return None
    return (
        f"{path} was saved by {before} processes and goes on in {world_size}: the global batch and "
        "the order of the data stay, the random states of the processes (dropout) are others, and "
        "sums over processes are rounded in another order"
    )


def _is_readable(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt"):  # compares the header with the file's length
            return True
    except (OSError, SafetensorError):
        return False
