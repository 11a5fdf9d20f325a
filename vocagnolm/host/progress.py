"""Progress of what takes long, where no bar can be shown: lines at intervals."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vocagnolm.io import duration

# Before the first line, so that what is soon done says nothing, and between two.
_FIRST_S, _EVERY_S = 5.0, 30.0


@contextmanager
def telling(what: str, note: Callable[[str], object]) -> Iterator[None]:
    """Note that work goes on, in lines at intervals, until it is done."""
    began, is_done = time.monotonic(), threading.Event()

    def tell() -> None:
        wait = _FIRST_S
        while not is_done.wait(wait):
            note(f"{what} ... ({duration(time.monotonic() - began)})")
            wait = _EVERY_S

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_done.set()
        teller.join()


def tell_datasets_progress(note: Callable[[str], object]) -> None:
    """Have `datasets` note in lines what it shows as bars on a terminal."""
    from datasets.utils import tqdm

    def display(bar: tqdm, *_: object, **__: object) -> None:
        # Else it would end its line as it closes.
        bar.leave = False
        now, facts = time.monotonic(), bar.format_dict
        due = vars(bar).setdefault("due", now + _FIRST_S)
        if now < due or not facts["n"]:
            return
        bar.due = now + _EVERY_S
        note(_progress(str(facts["prefix"]), facts["n"], facts["total"], facts["elapsed"]))

    tqdm.display = display


def _progress(what: str, done: int, total: int | None, elapsed_s: float) -> str:
    """Write how far something is, and how long it takes from here.

    >>> _progress("Aligning documents (num_proc=2)", 120_000, 1_000_000, 60)
    'aligning documents: 120,000 of 1,000,000, 7 m 20 s left'
    >>> _progress("Generating train split", 5, None, 60)
    'generating train split: 5'
    """
    name = what.partition(" (")[0].strip(": ") or "working"
    name = name[0].lower() + name[1:]
    if not total:
        return f"{name}: {done:,}"
    return f"{name}: {done:,} of {total:,}, {duration(elapsed_s / done * (total - done))} left"
