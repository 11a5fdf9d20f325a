"""Explain in one line why a run ended: the cause, the place, and what to do."""

import traceback
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from vocagnolm.io import read_asset

# Read at once: a disk that fails gives no explanation any more.
_KNOWN = read_asset("failures.yaml")["failures"]


def explain(error: BaseException, doing: str) -> str | None:
    """Say cause, place ("the student's forward of step 3") and remedy of an error that is known."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    frames = traceback.extract_tb(error.__traceback__)
    if frames and Path(frames[-1].filename).parent.name == "multiprocessing":
        kinds.add("error of a lock")
    for known in _KNOWN:
        if kinds.intersection(known["kinds"]) or any(x in str(error) for x in known["words"]):
            return str(known["says"]).format(doing=doing, reason=_reason(error))
    return None


def _reason(error: BaseException) -> str:
    """Return the first line of an error; of several processes' errors, of one of them."""
    if isinstance(error, CheckpointException):
        for found, _ in error.failures.values():
            return _reason(found)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
