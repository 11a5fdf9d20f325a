"""The demo's directory: what it creates there, and what it replaces on the next run. No torch."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vocagnolm.demo import world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.fields import OptionError
from vocagnolm.shell.io import ASSETS, check_writable, claim_names

# In a seed's directory: the student that all methods begin with, pages and conversations.
BASE, PAGES, _CONVERSATIONS = "base", "pages.jsonl", "talks.jsonl"
# Next to the seeds: the table, and the libraries' caches.
RESULTS, CACHE = "results.json", "cache"
# Also next to the seeds: links to the first seed's files, for the commands of the docs.
_STUDENT_LINK, _TEACHER_LINK = "student", "teacher"
_LINKS = (PAGES, _CONVERSATIONS, _STUDENT_LINK, _TEACHER_LINK)
_CONVERSATION_COUNT = 1500


def seed_name(seed: int) -> str:
    """Name the directory of a seed."""
    return f"seed{seed}"


@contextmanager
def claimed(directory: Path, seeds: Sequence[int]) -> Iterator[None]:
    """Lock the directory against other demos, and remove what an earlier one left for these seeds.

    Raises:
        ValueError: another demo is running there, or something in the way is not the demo's.
    """
    check_writable(directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        # The system releases the lock when the process ends, in whatever way.
        with FileLock(directory / ".lock", timeout=0):
            names = [seed_name(seed) for seed in seeds]
            names += [RESULTS, CACHE]
            claim_names(directory, names, "vocagnolm demo", _LINKS)
            # The demo starts over. It resumes no earlier runs, and keeps none of their results.
            for name in [*names, *_LINKS]:
                _remove(directory / name)
            yield
    except Timeout as error:
        raise OptionError(
            "output_dir",
            f"{directory}: another demo is running there: wait for it, or give another",
        ) from error


def _remove(path: Path) -> None:
    """Remove a file, a link or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def leave_for_the_docs(directory: Path, seed: int) -> None:
    """Link a student, its teacher, pages and conversations under the names that the docs use."""
    home = Path(seed_name(seed))
    conversations = world.conversations(_CONVERSATION_COUNT, seed)
    world.write_rows(directory / home / _CONVERSATIONS, conversations)
    (directory / _STUDENT_LINK).symlink_to(home / BASE)
    (directory / _TEACHER_LINK).symlink_to(ASSETS / TEACHER)
    for name in (PAGES, _CONVERSATIONS):
        (directory / name).symlink_to(home / name)
