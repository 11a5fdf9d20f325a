"""Who owns an output directory, and what the results in it were made from."""

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vocagnolm.fields import OptionError

logger = logging.getLogger(__name__)

# Settings by name, as JSON can hold them: what a run, a checkpoint, a store or an evaluation was
# made from.
Record = Mapping[str, Any]
# These settings identify content: {setting: what has that content}. A run identifies no student
# but that of adapters, so that another one with the name checkpoint-500 is refused.
_CONTENT = {
    "blocks": "dataset",
    "corpus_digest": "dataset",
    "student_hashes": "your model",
    "adapters": "your adapters",
    "teacher_hashes": "teacher",
    "teacher_losses_sha256": "teacher_losses",
    "chat_templates_sha256": "the chat templates",
    "own_code_sha256": "your code",
    "evaluation": "the evaluation",
}

# A network file system may release the lock of a dead machine up to this many seconds late.
_LOCK_S = 120
# A scheduler or a shell may write the output of a command into its output directory.
_LOGS = (".log", ".out", ".err")
# The directories that this process owns.
_owned: set[Path] = set()


def check_output_directory(path: Path, record: str, documents: Iterable[str] = ()) -> None:
    """Check that a command may write its results to a directory, before it does any work.

    Args:
        path: the directory, which need not exist.
        record: name of the file that tells a directory of this command from any other.
        documents: what the command reads. The results would be read, too, if they were inside.

    Raises:
        ValueError: it is inside a directory of documents, nothing can be written there, or another
            program's files are there.
    """
    for name in documents:
        if Path(name).is_dir() and path.resolve().is_relative_to(Path(name).resolve()):
            raise OptionError(
                "output_dir",
                f"{path} is inside {name}, so its files would be read as documents: give a "
                "directory elsewhere, or name the documents' files",
            )
    # A directory that does not exist will be made in its nearest existing parent.
    parent = path
    while not parent.exists():
        parent = parent.parent
    # Make a file, because permission bits do not show a read-only file system.
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        fault = f"{path}: {parent} cannot be written to ({error.strerror})"
        raise OptionError("output_dir", fault) from error
    # A command that was killed may have left only the file of its lock.
    if (path / record).exists() or _lock_file(path, record).exists():
        return
    for file in sorted(path.glob("*")):
        if not file.name.startswith(".") and file.suffix not in _LOGS:
            raise OptionError(
                "output_dir",
                f"{path} holds {file.name} and no {record}, so something else wrote it: give a new "
                "directory",
            )


@contextmanager
def output_directory(path: Path, record: str, *, move_aside: bool = False) -> Iterator[None]:
    """Own a directory: check it, make it, and keep other processes from writing there.

    The process that owns it may ask for it again. With `move_aside`, what is there gets another
    name first, such as `NAME-earlier-1`.

    Raises:
        ValueError: see `check_output_directory`; or another process owns it.
    """
    directory = path.resolve()
    if directory in _owned:
        yield
        return
    check_output_directory(path, record)
    with ExitStack() as locks:
        locks.callback(_lock(directory, record).release)
        if move_aside:
            earlier = _free_name(directory)
            # One rename moves everything or nothing, whenever a kill comes. The lock moves along.
            directory.rename(earlier)
            locks.callback(_lock(directory, record).release)
            logger.warning(
                "%s holds an earlier run, which was moved to %s. To continue it, move it back "
                "and call train(resume_from_checkpoint=True)",
                path,
                earlier,
            )
        _owned.add(directory)
        locks.callback(_owned.remove, directory)
        yield


def _lock_file(directory: Path, record: str) -> Path:
    """Name the lock of a command, which stays when the command has ended."""
    return directory / f".{record}.lock"


def _lock(directory: Path, record: str) -> FileLock:
    """Make a directory, and wait for its lock, which the system releases when a process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_lock_file(directory, record))
    try:
        # The first try does not wait, so that the warning below comes before the wait.
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for another process that writes to %s", directory)
        try:
            lock.acquire(timeout=_LOCK_S)
        except Timeout:
            raise OptionError(
                "output_dir",
                f"{directory} is in use by another process: stop it, or give another directory",
            ) from None
    return lock


def _free_name(directory: Path) -> Path:
    """Return a name next to a directory that is not taken."""
    number = 1
    while directory.with_name(f"{directory.name}-earlier-{number}").exists():
        number += 1
    return directory.with_name(f"{directory.name}-earlier-{number}")


def differences(before: Record, now: Record) -> list[str]:
    """List in words how a record differs from an earlier one of the same directory.

    Only what is in `now` counts, because an earlier version may have had other settings. Content
    counts if both records identify it: a digest is not known before a corpus is read. A file whose
    content the earlier record identifies may be in another directory, because a scheduler may give
    each start of a job its own.

    >>> differences({"top_k": 0.4, "kwargs": {"a": 1}}, {"top_k": 0.5, "kwargs": {"a": 2}})
    ['kwargs.a was 1, now 2', 'top_k was 0.4, now 0.5']
    """
    # Earlier records were read from JSON, where a tuple is a list.
    before, now = json.loads(json.dumps([dict(before), dict(now)]))
    identified = {owner for name, owner in _CONTENT.items() if before.get(name)}
    changes = []
    for name in sorted(now):
        earlier, value = before.get(name), now[name]
        if name in identified:
            earlier, value = _without_folders(earlier), _without_folders(value)
        if earlier == value:
            continue
        if name in _CONTENT:
            if earlier is not None:
                changes.append(f"the content of {_CONTENT[name]} has changed")
        elif isinstance(earlier, dict) and isinstance(value, dict):
            for key in sorted(earlier | value):
                if earlier.get(key) != value.get(key):
                    changes.append(f"{name}.{key} was {earlier.get(key)}, now {value.get(key)}")
        else:
            changes.append(f"{name} was {earlier}, now {value}")
    # Two settings identify the documents.
    return list(dict.fromkeys(changes))


def _without_folders(value: Any) -> Any:
    """Cut absolute paths to their last parts, also within lists and dictionaries."""
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value
