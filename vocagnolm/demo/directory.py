"""The demo's directory: what it creates there, and what it replaces on the next run. No torch."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vocagnolm.demo import world
from vocagnolm.demo.methods import TEACHER
from vocagnolm.record import output_directory
from vocagnolm.shell.io import ASSETS

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
def fresh_directory(directory: Path, seeds: Sequence[int]) -> Iterator[None]:
    """Own a demo's directory, and remove what an earlier demo left for these seeds."""
    with output_directory(directory, RESULTS):
        # The demo starts over. It resumes no earlier runs, and keeps none of their results.
        for name in (CACHE, *map(seed_name, seeds)):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name in (RESULTS, *_LINKS):
            (directory / name).unlink(missing_ok=True)
        yield


def leave_for_the_docs(directory: Path, seed: int) -> None:
    """Link a student, its teacher, pages and conversations under the names that the docs use."""
    home = Path(seed_name(seed))
    conversations = world.conversations(_CONVERSATION_COUNT, seed)
    world.write_rows(directory / home / _CONVERSATIONS, conversations)
    (directory / _STUDENT_LINK).symlink_to(home / BASE)
    (directory / _TEACHER_LINK).symlink_to(ASSETS / TEACHER)
    for name in (PAGES, _CONVERSATIONS):
        (directory / name).symlink_to(home / name)
