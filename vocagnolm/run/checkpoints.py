"""Find, check, finish and rotate the checkpoints of a run; tell whether it is finished.

The order of writes makes a checkpoint whole or absent, however the run is killed:

    make_room       checkpoint-8 of an earlier save, if whole, becomes checkpoint-8-replaced
    transformers    weights, optimizer, schedule, random states, trainer_state.json
    metrics         metrics_<process>.safetensors
    finish          the manifest, when all processes have written; then checkpoint-8-replaced goes
    rotate          the oldest go, their manifests first
"""

import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from vocagnolm.host import manifest
from vocagnolm.host.settings import RUN_FILE
from vocagnolm.io import json_or_empty
from vocagnolm.run import relayout

logger = logging.getLogger(__name__)

AUTO = "auto"
_REPLACED = "-replaced"  # the end of the name of a checkpoint while its step is saved again
STATE, _CARD = "trainer_state.json", "README.md"
_METRICS = "metrics_*.safetensors"  # of `training.metrics`, which transformers alone has not
_LARGE_BYTES = 10**9
_VISIBLE_S = 60
Tell = Callable[[str], object]  # receives lines on work that takes a while
Origin = Callable[[Path], "str | None"]  # says why a checkpoint is not of this run, if it is not


def _anywhere(path: Path) -> None:
    """Accept every checkpoint."""


def resolve(
    resume_from_checkpoint: str | None,
    output_dir: str | Path,
    tell: Tell = logger.info,
    origin: Origin = _anywhere,
) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` means.

    "auto" is the newest good one, if any. A path is where the run begins; once it has saved a later
    step it resumes from there, so that a scheduler may start the same command again.

    Raises:
        ValueError: a path was given and the checkpoint there is not good.
    """
    newest = find_checkpoint(output_dir, tell, origin)
    if resume_from_checkpoint in (None, AUTO):
        return newest
    path = Path(str(resume_from_checkpoint))
    # A checkpoint under another name tells its step inside.
    step = _step(path) or json_or_empty(path / STATE).get("global_step")
    if newest is not None and (_step(Path(newest)) or 0) > (step if isinstance(step, int) else 0):
        tell(f"{newest} is newer than --resume_from_checkpoint {path}")
        return newest
    if fault := checkpoint_fault(path, tell, origin):
        raise ValueError(f"--resume_from_checkpoint {path}: {fault}")
    return str(path)


def find_checkpoint(
    output_dir: str | Path, tell: Tell = logger.info, origin: Origin = _anywhere
) -> str | None:
    """Return the newest good checkpoint of a run, or None; warn of newer ones that are not."""
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


def _age(path: Path) -> tuple[int, bool]:
    return _step(path) or 0, not path.name.endswith(_REPLACED)


def finish_run(output_dir: str | Path, names: Collection[str]) -> None:
    """Declare the final model of a run complete, which has files of these names."""
    manifest.write_manifest(Path(output_dir), {}, {*names, STATE})


def final_fault(output_dir: str | Path) -> str | None:
    """Read every byte of a finished run's model and describe its fault; None if it is good."""
    directory = Path(output_dir)
    # Runs that ended before final models had one are as good as `is_finished` says.
    if not is_complete(directory):
        return None
    try:
        entries = manifest.read_manifest(directory)[manifest.FILES]
        return next((" ".join(f) for f in manifest.find_faults(directory, entries)), None)
    except (ValueError, OSError) as error:
        return str(error)


def is_finished(output_dir: str | Path) -> bool:
    """Test whether a run has taken its last step and saved its model: the card is written last."""
    directory = Path(output_dir)
    if is_complete(directory):
        return (directory / _CARD).exists()
    state = json_or_empty(directory / STATE)
    weights = list(directory.glob("*.safetensors"))
    return (
        state.get("global_step", 0) >= state.get("max_steps", sys.maxsize)
        and bool(weights)
        and all(map(_is_readable, weights))
        and (directory / _CARD).exists()
    )


def _is_readable(weights: Path) -> bool:
    try:
        with safe_open(weights, framework="pt"):  # compares the header with the file's length
            return True
    except (OSError, SafetensorError):
        return False


def checkpoint_fault(
    path: str | Path, tell: Tell = logger.info, origin: Origin = _anywhere
) -> str | None:
    """Read every byte of a checkpoint and describe its fault; None if it is good."""
    path = Path(path)
    if not path.is_dir():
        return "no such directory"
    try:
        return origin(path) or _content_fault(path, tell)
    # A bad sector, or files that vanish from a network file system.
    except OSError as error:
        return f"it cannot be read ({error})"


def _content_fault(path: Path, tell: Tell) -> str | None:
    state = json_or_empty(path / STATE)
    step = state.get("global_step")
    if not isinstance(step, int) or not _is_state(state):
        return f"{STATE} is missing or damaged"
    try:
        found = manifest.read_manifest(path)
    except ValueError as error:
        return str(error)
    written = found.get("step")
    for source, other in ((STATE, step), ("its name", _step(path))):
        if other is not None and other != written:
            return f"{manifest.MANIFEST_FILE} is of step {written}, {source} of step {other}"
    if (size := sum(entry["bytes"] for entry in found[manifest.FILES])) > _LARGE_BYTES:
        tell(f"checking the {size / 1e9:.1f} GB of {path}")
    return manifest.content_fault(path, found) or _pickle_fault(path)


def _is_state(state: Mapping[str, Any]) -> bool:
    """Test whether a Trainer can take up a state: its fields, and a log of steps and losses."""
    try:
        log = TrainerState(**state).log_history
        return all(isinstance(entry["step"] + entry.get("loss", 0.0), int | float) for entry in log)
    except (TypeError, KeyError, AttributeError):
        return False


def _pickle_fault(path: Path) -> str | None:
    """Name a file of states that holds more than numbers, which is never run."""
    file = path
    try:
        with safe_globals():  # type: ignore[no-untyped-call]  # of random states
            for file in sorted([*path.glob("*.pt"), *path.glob("*.pth")]):
                torch.load(file, "cpu", weights_only=True, mmap=True)
        relayout.check_indices(path)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        return f"{file.name} is no saved state ({str(error).splitlines()[0][:80]})"
    return None


# -- Writing -----------------------------------------------------------------------------------


def is_complete(path: Path) -> bool:
    """Test whether a checkpoint was once written to its end; its content is not read."""
    return (path / manifest.MANIFEST_FILE).exists()


def make_room(path: Path) -> None:
    """Remove a half-written checkpoint, or put a whole one aside until `finish`."""
    if is_complete(path):
        _remove(_aside(path))
        path.rename(_aside(path))
    else:
        _remove(path, ignore_errors=False)


def finish(path: Path, step: int, world_size: int, expected: Sequence[str]) -> None:
    """Declare a checkpoint complete, when all processes have written the expected files.

    Raises:
        OSError: one is not there.
    """
    for _ in range(_VISIBLE_S):
        missing = [name for name in expected if not (path / name).exists()]
        if not missing:
            break
        # A network file system shows another machine's files a little later.
        time.sleep(1)
    else:
        raise OSError(
            f"{path} lacks {missing[0]}, which another process has written: --output_dir must be "
            "a directory that all machines share"
        )
    run = json_or_empty(path.parent / RUN_FILE)
    # A network file system may not list all of them yet.
    names = {*manifest.written_files(path), *expected}
    manifest.write_manifest(path, {"step": step, "world_size": world_size, "run": run}, names)
    _remove(_aside(path))


def _aside(path: Path) -> Path:
    return path.with_name(path.name + _REPLACED)


def rotate(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of ours beyond a limit, unfinished ones first.

    The newest and the best stay. A limit of None or 0 keeps all.
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
    """Test whether a checkpoint is finished, or the remains of a save of ours."""
    # transformers writes its state last; our metrics come after it, the manifest after them.
    is_whole_elsewhere = (path / STATE).exists()
    return is_complete(path) or not is_whole_elsewhere or any(path.glob(_METRICS))


def _remove(path: Path, ignore_errors: bool = True) -> None:
    # The target of a link is the user's.
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        # First the manifest, so that half of it is no checkpoint.
        (path / manifest.MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors)


def change_of_processes(path: Path, world_size: int) -> str | None:
    """Describe the effects of another number of processes than before, if it is another."""
    before = json_or_empty(path / manifest.MANIFEST_FILE).get("world_size", world_size)
    if before == world_size:
        return None
    return (
        f"{path} was saved by {before} processes and goes on in {world_size}: the global batch and "
        "the order of the data stay, the random states of the processes (dropout) are others, and "
        "sums over processes are rounded in another order"
    )
